"""VlmlabError: what was expected, what arrived, what to do next; nothing else reaches the person at the keyboard."""


class VlmlabError(Exception):
    """A problem the user can act on. The command line prints it as one sentence and exits with code 2."""
