"""Whole clusters in one thread: a fake network, clock and file system around the production code.

A seed decides everything (`swarm.py`): the cluster, its settings, and how often each fault comes. `schedule.py` runs
one seed. `world.py` starts machines (`machine.py`), brokers (`broker.py`, `replication.py`, `serving.py`), the
controller (`controller.py`, `store.py`) and clients (`client.py`, `producer.py`, `consumer.py`) over `network.py` in
the virtual time of `scheduler.py`. `faults.py` injects faults, `invariants.py` checks the rules after every event, and
`ending.py` heals and judges. `many.py` runs seeds on all cores. What a thread does in production is an event here; its
rules are the same code.

To add something that a cluster does, add a client beside `producer.py`, its calls in `BrokerProcess._answer`, its
streams in `BrokerProcess.accept`, what must hold in `Invariants` (one function a rule, which names the bug that it
finds), and what must be true at the end in `ending.py`. Put the bug into `tests/sim/bugs.py` to show that the rule
finds it. A new kind of fault is a method of `Faults` and a line in `swarm.FAULTS`. Nothing may depend on a hash, an
address or a real clock: iterate over lists and dicts, and draw from the world's generators.
"""
