"""The errors a caller can catch.

ZerowatchError
|-- SettingsError     a setting has a bad value; raised at start-up
|-- DsConfigError     the DeepSpeed configuration is missing, no JSON or has an unknown key
`-- CommandLineError  the command line cannot be carried out as written

All are the caller's mistakes, raised before training starts. During training, watching never
raises.
"""


class ZerowatchError(Exception):
    """Base of every error that zerowatch raises; its text says what, where and what to do."""


class SettingsError(ZerowatchError):
    """A setting has a value that is not allowed, or does not exist."""


class DsConfigError(ZerowatchError):
    """The DeepSpeed configuration cannot be used."""


class CommandLineError(ZerowatchError):
    """The command line asks for something that cannot be done."""
