"""The errors a caller can catch.

ZerowatchError
|-- SettingsError       a setting has a bad value; raised at start-up
|-- DsConfigError       the DeepSpeed configuration is missing, no JSON or has an unknown key
|-- CommandLineError    the command line cannot be carried out as written
|-- BatchError          TrainingRun: a batch that cannot be trained on; nothing was changed
|-- NonFiniteLossError  TrainingRun: a loss is nan or inf; no update was made of that batch
|-- RebuildError        TrainingRun: the engine was not rebuilt; training goes on as it was
`-- CheckpointError     TrainingRun: a saved state that cannot be written or loaded

Watching never raises during training. `TrainingRun` does, for it is the loop itself; after each of
its errors the run stands as it did before the call.
"""


class ZerowatchError(Exception):
    """Base of every error that zerowatch raises; its text says what, where and what to do."""


class SettingsError(ZerowatchError):
    """A setting has a value that is not allowed, or does not exist."""


class DsConfigError(ZerowatchError):
    """The DeepSpeed configuration cannot be used."""


class CommandLineError(ZerowatchError):
    """The command line asks for something that cannot be done."""


class BatchError(ZerowatchError):
    """A batch cannot be trained on: its leaves disagree, it is empty, or nothing in it counts."""


class NonFiniteLossError(ZerowatchError):
    """The loss of a window is nan or inf, on this rank or another."""


class RebuildError(ZerowatchError):
    """The engine was not rebuilt, and training goes on as it was."""


class CheckpointError(ZerowatchError):
    """A saved state cannot be written or loaded."""
