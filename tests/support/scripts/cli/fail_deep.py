"""Script that raises an error in a function while it handles another error."""


def outer():
    try:
        inner()
    except ZeroDivisionError as error:
        raise ValueError("bad batch") from error


def inner():
    return 1 / 0


outer()
