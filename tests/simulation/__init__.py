"""A world in which time, network and failures are drawn from a seed.

The generators and the Lua that run in it are the shipped ones.

``python -m tests.simulation --seeds 10000`` explores; ``--seed N --story`` tells one history.
"""
