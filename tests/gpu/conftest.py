"""Everything here needs a GPU, and says so where there is none."""

from pathlib import Path

import pytest

from kernelbraid.audit.environment import require_device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        require_device("cuda")
        reason = ""
    except ValueError as error:
        reason = str(error)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
