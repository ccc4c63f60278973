"""Names how monitoring of a rank ended, for the metric run_end_info."""

from __future__ import annotations

from ...errors import PeerFailedError, PeerOutOfMemoryError
from ..memory.oom.oom_error import is_caused_by_oom


def end_reason(error: BaseException | None, *, failed: bool, interrupted: bool) -> str:
    """Return one of `END_REASONS`, as far as the error shows it.

    Args:
        error: The error that ends the run; None if it is unknown.
        failed: Whether the run ends by an error other than Ctrl-C.
        interrupted: Whether Ctrl-C ends the run.
    """
    from ..trainer.run_end import is_communication_error  # imports DeepSpeed

    if interrupted:
        return "interrupted"
    if not failed:
        return "completed"
    if error is None:
        return "exception"
    if isinstance(error, PeerFailedError | PeerOutOfMemoryError) or is_communication_error(error):
        return "peer_failed"
    return "out_of_memory" if is_caused_by_oom(error) else "exception"
