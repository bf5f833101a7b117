"""The exception for a user's mistake: a single sentence, shown without a traceback."""


class UserError(ValueError):
    """Says in one sentence what is wrong, the value seen, and what to do about it."""


def check(condition: bool, message: str) -> None:
    """Raises `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)
