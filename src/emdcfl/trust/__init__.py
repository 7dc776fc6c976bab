"""Protection against faulty and hostile clients: quarantine, flags of unusual values, and robust averages."""

from emdcfl.trust.guard import Guard, TrustedMean
from emdcfl.trust.ledger import Fault, Flag, Ledger
from emdcfl.trust.policy import Trust

__all__ = ["Fault", "Flag", "Guard", "Ledger", "Trust", "TrustedMean"]
