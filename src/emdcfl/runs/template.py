"""The commented config that ``emdcfl init`` writes."""

from __future__ import annotations


def template() -> str:
    """The commented config that ``emdcfl init`` writes. As it stands, it is the defaults."""
    return _TEMPLATE


_TEMPLATE = """\
# A run of emdcfl. Start it with: emdcfl run THIS-FILE --out runs/first
# Lines that begin with "# key =" show what may be set; left out, the default named beside them holds.

[run]
seed = 0                    # the same seed gives the same bytes
# rounds = 20               # default: the scenario's
# participants = 4          # clients drawn per round; default: all
evaluate_every = 1          # test the models every so many rounds (the last round always)

[scenario]
name = "rotated-digits"     # who the clients are and what they hold; further keys are options of the scenario

[method]
name = "emdcfl"             # or fedavg, oracle, local; further keys are options of the method
# tolerance = "auto"        # emdcfl: two clients are linked when their distance W is below this, both ways; the paper's: 0.025

# [privacy]                 # emdcfl: Gaussian noise on the embeddings that clients send (docs/guide/privacy-settings.md); default: none
# epsilon = 64              # (epsilon, delta)-differential privacy per record and release
# delta = 1e-5

# [model]                   # default: the scenario's
# name = "cnn"              # a built-in model, or "package.module:function"; further keys are its options

[training]
# local_epochs = 5          # default: the scenario's
# batch_size = 32           # default: the scenario's
# lr = 0.01                 # default: the scenario's
momentum = 0.9
weight_decay = 1e-6

[personalize]               # after the last round, every client fine-tunes the model it is served on its own train split
mode = "off"                # "if-it-pays": kept where its validation loss improves by more than chance; "on": always kept
epochs = 10
# lr = 0.002                # default: a fifth of training.lr

[engine]
name = "auto"               # "sequential" (the reference), "batched", "cuda", "flower"; auto picks one of the first three by a fixed rule
workers = 1                 # processes of the sequential engine; their number does not change its bits
device = "auto"             # "cpu", "cuda", "cuda:1"; auto takes a GPU if there is one
precision = "fp32"          # "bf16", or "tf32" on a GPU, is faster and less exact
threads = 1                 # per client task; other numbers may change the last bits
# streams = 8               # cuda: clients trained at the same time; default: by the size of the network
deterministic = true        # cuda: false lets the GPU's libraries pick faster algorithms whose bits vary
compile = "auto"            # cuda: "yes" compiles the training step (half a minute, then faster); auto: in long runs
on_failure = "auto"         # a failed client: "stop" ends the run, "continue" goes on without it; auto: continue over Flower
quorum = 0.5                # share of the drawn clients that must have trained for a round to count
retries = 2                 # how often a round below the quorum is tried again

[trust]                     # how much a single client is believed; docs/guide/privacy-settings.md explains
max_faults = 3              # rounds with a reply that validation rejected before a client is left out for good
max_n = 100000000           # most samples a client may claim
max_share = 1.0             # largest share of an average one client may have, whatever it claims
aggregate = "mean"          # "trimmed-mean" or "median": coordinate by coordinate inside a cluster, without n
trim = 0.2                  # share that "trimmed-mean" cuts off at each end
# clip = 2.0                # updates longer than this many times their cluster's median are shortened; default: not
flag = 6.0                  # robust z-score from which values that stand out are flagged; 0: never
"""
