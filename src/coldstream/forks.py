"""Objects that a forked child cannot use: their threads do not exist there, and locks may stay held."""

import os

from coldstream.errors import GenerationFault


class OwnProcess:
    """The process that made an object. Asking takes no lock, so that it is safe in a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises GenerationFault in a forked child."""
        if os.getpid() != self._pid:
            raise GenerationFault(
                "this model was opened before fork(), and its threads do not exist here: open the model in "
                "the child process, or start it with the 'spawn' method"
            )
