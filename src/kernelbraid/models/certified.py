"""Whether this machine holds certificates of the operators in use."""

from collections.abc import Sequence

from kernelbraid import ops


def certified(operator: str, backend: str = "cpu") -> bool:
    """Whether this environment holds a certificate of an operator: of its source in use, contract and judge.

    Args:
        operator: its name.
        backend: `cpu` or `cuda`.

    Raises:
        ValueError: there is no such operator.
    """
    from kernelbraid.audit.certificates import local_certificate

    return local_certificate(ops.get(operator, backend)) is not None


def uncertified(operators: Sequence[str], backend: str) -> tuple[str, ...]:
    """Those operators without a certificate."""
    return tuple(name for name in operators if not certified(name, backend))
