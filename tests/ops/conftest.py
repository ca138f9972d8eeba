import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_installed(tmp_path_factory):
    """Tests call the shipped implementation, whatever this user has promoted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELBRAID_HOME", str(tmp_path_factory.mktemp("home")))
        yield
