"""Exceptions that zerowatch raises for its callers.

ZerowatchError
|-- SettingsError         a setting has a bad value; raised at start-up
|-- DsConfigError         the DeepSpeed configuration is missing, not JSON or has an unknown key
|-- CommandLineError      the command line asks for something that cannot be done
|-- BatchError            TrainingRun: a batch that cannot be trained on; nothing was changed
|-- NonFiniteLossError    TrainingRun: a loss is nan or inf; no update was made from the batch
|-- PeerFailedError       TrainingRun: the script's own code failed on another rank
|-- PeerOutOfMemoryError  TrainingRun: memory ran out on another rank; a RuntimeError too
|-- RebuildError          TrainingRun: the engine was not rebuilt; training continues as before
`-- CheckpointError       TrainingRun: a checkpoint that cannot be written or loaded

Monitoring never raises during training. `TrainingRun` does, because it is the training loop; after
each of these errors the run is in the state before the call, except a PeerFailedError whose
`can_continue` is False. Some engines cannot discard a batch, such as those with Muon. There, each
error in the passes of `train_batch` ends the run. A warning at the start names the reason.

If smaller micro-batches cannot avoid an out-of-memory error, the rank that ran out of memory raises
torch's error, and the other ranks raise `PeerOutOfMemoryError`. The run is in the state before the
call in this case too, unless memory ran out within the optimizer's update. Then restart the run
from its last checkpoint.
"""

MAX_SHOWN = 200  # characters of a value in a message


def shortened(value: object) -> str:
    """Return the representation of a value for a message, cut if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return cut(text)


def cut(text: str) -> str:
    """Return a text for a message, cut if it is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


class ZerowatchError(Exception):
    """Base of all errors of zerowatch. Its message says what failed, where, and what to do."""


class SettingsError(ZerowatchError):
    """A setting does not exist, or has a value that is not allowed."""


class DsConfigError(ZerowatchError):
    """The DeepSpeed configuration cannot be used."""


class CommandLineError(ZerowatchError):
    """The command line asks for something that cannot be done."""


class BatchError(ZerowatchError):
    """A batch cannot be trained on: its tensors differ in length, it is empty, or has no weight."""


class NonFiniteLossError(ZerowatchError):
    """The loss of a step is nan or inf, on this rank or another."""


class PeerFailedError(ZerowatchError):
    """Another rank failed in code of the script, such as the loss.

    The rank that failed raises the script's own error. All ranks are in the state before the call,
    unless `can_continue` is False.

    Attributes:
        rank: The first rank that failed.
        error_type: Name of that rank's exception class.
        error_text: Message of that exception, cut to 500 characters.
        place: Call in which that rank failed, such as "train_batch".
        failed_ranks: All ranks that failed.
        can_continue: Whether the run can continue. It cannot after an error in an update, and if
            the ranks could not leave a pass together. Then every later call raises an error, and
            the run must be restarted.
    """

    def __init__(
        self,
        rank: int,
        error_type: str,
        error_text: str,
        place: str,
        failed_ranks: tuple[int, ...],
        can_continue: bool = True,
    ) -> None:
        super().__init__(rank, error_type, error_text, place, failed_ranks, can_continue)
        self.rank, self.error_type, self.error_text = rank, error_type, error_text
        self.place, self.failed_ranks = place, failed_ranks
        self.can_continue = can_continue

    def __str__(self) -> str:
        """Return one line with the rank, the place, and the error."""
        others = len(self.failed_ranks) - 1
        more = f" (and {others} more)" if others else ""
        error = f"{self.error_type}: {self.error_text}" if self.error_text else self.error_type
        advice = (
            "Correct it there; or catch this error on all ranks, and the error itself on that "
            "rank, to go on"
            if self.can_continue
            else "The other ranks may have been waiting for it in a collective, so the run has "
            "ended on all ranks. Restart it from its last checkpoint"
        )
        return f"{self.place} failed on rank {self.rank}{more} with {error}. {advice}"


class PeerOutOfMemoryError(ZerowatchError, RuntimeError):
    """Another rank ran out of memory. That rank raises torch's own error."""


class RebuildError(ZerowatchError):
    """The engine was not rebuilt. Training can continue as before."""


class CheckpointError(ZerowatchError):
    """A checkpoint cannot be written or loaded."""
