"""The one error type that speaks to the person at the keyboard."""


class UserError(Exception):
    """Something the user can mend: says what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """
