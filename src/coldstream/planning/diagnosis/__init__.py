"""What there is to say of a machine and an installation before any model runs, for `coldstream doctor`.

`gather.py` looks, once. `findings.py` is a pure function of what was seen. Knows no model, and not how
anything is printed.
"""

from coldstream.planning.diagnosis.findings import Finding, exit_code_of, find
from coldstream.planning.diagnosis.gather import gather_facts
from coldstream.planning.diagnosis.machine_facts import MachineFacts

__all__ = ["Finding", "MachineFacts", "exit_code_of", "find", "gather_facts"]
