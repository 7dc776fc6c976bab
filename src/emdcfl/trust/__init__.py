"""What is believed of clients: the policy, who is quarantined, what was noticed, and averages that one client cannot own.

May import: errors, params, numpy and torch.
"""

from emdcfl.trust.guard import Guard, TrustedMean
from emdcfl.trust.ledger import Fault, Flag, Ledger
from emdcfl.trust.policy import Trust

__all__ = ["Fault", "Flag", "Guard", "Ledger", "Trust", "TrustedMean"]
