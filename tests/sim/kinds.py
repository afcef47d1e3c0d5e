"""Which features a seed's schedule has. A bug that needs a feature is looked for only in schedules that have it."""

from __future__ import annotations

import random

from spark_broker.testing.simulation import (
    bit_flips,
    clock_jumps,
    compaction,
    disk_faults,
    lone_start,
    long_polls,
    older_metadata,
    store,
    tiering,
    unclean,
)
from spark_broker.testing.simulation.group_draw import GroupDraw
from spark_broker.testing.simulation.sharing_draw import SharingDraw
from spark_broker.testing.simulation.transaction_draw import TransactionDraw


def is_any(seed: int) -> bool:
    """Every schedule."""
    del seed
    return True


def has_transactions(seed: int) -> bool:
    """Transactional producers and applications with many writers."""
    return TransactionDraw.draw(seed) is not None


def has_single_use(seed: int) -> bool:
    """Applications for a single use (batch writes) beside applications with many versions."""
    draw = TransactionDraw.draw(seed)
    return draw is not None and draw.writes > 0


def has_groups(seed: int) -> bool:
    """Consumer groups."""
    return GroupDraw.draw(seed) is not None


def has_sharing(seed: int) -> bool:
    """Consumer groups whose members share partitions."""
    return SharingDraw.draw(seed) is not None


def has_lone_start(seed: int) -> bool:
    """A first broker that is alone when the topics of coordinators are made."""
    coordinated = has_transactions(seed) or has_groups(seed) or has_sharing(seed)
    return coordinated and random.Random(f"{seed}/lone start draw").random() < lone_start.SHARE


def has_long_polls(seed: int) -> bool:
    """Readers that wait on their leaders."""
    return random.Random(f"{seed}/long polls draw").random() < long_polls.SHARE


def has_bit_flips(seed: int) -> bool:
    """Files that rot."""
    return random.Random(f"{seed}/bit flips draw").random() < bit_flips.SHARE


def has_disk_faults(seed: int) -> bool:
    """Topics that come and go, disks without room or descriptors, older copies, files that are gone."""
    return random.Random(f"{seed}/disk faults draw").random() < disk_faults.SHARE


def has_older_metadata(seed: int) -> bool:
    """A metadata store that is replaced by an older copy."""
    return random.Random(f"{seed}/older metadata draw").random() < older_metadata.SHARE


def may_have_unclean_elections(seed: int) -> bool:
    """Unclean elections, unless it has bit flips or transactions as well."""
    return random.Random(f"{seed}/unclean draw").random() < unclean.SHARE


def has_unclean_elections(seed: int) -> bool:
    """Unclean elections."""
    return may_have_unclean_elections(seed) and not has_bit_flips(seed) and not has_transactions(seed)


def has_groups_and_unclean_elections(seed: int) -> bool:
    """Consumer groups, and unclean elections."""
    return may_have_unclean_elections(seed) and has_groups(seed)


def has_compaction(seed: int) -> bool:
    """Topics that are compacted, unless it has unclean elections."""
    share = compaction.SHARE_OF_TRANSACTIONS if has_transactions(seed) else compaction.SHARE
    return random.Random(f"{seed}/compaction draw").random() < share


def has_compaction_and_transactions(seed: int) -> bool:
    """Topics that are compacted, and transactions."""
    return has_compaction(seed) and has_transactions(seed)


def has_tiering(seed: int) -> bool:
    """Topics with Delta tables."""
    if has_unclean_elections(seed):
        share = tiering.SHARE_OF_UNCLEAN
    else:
        share = tiering.SHARE_OF_COMPACTION if has_compaction(seed) else tiering.SHARE
    return random.Random(f"{seed}/tiering draw").random() < share


def has_tiering_and_unclean_elections(seed: int) -> bool:
    """Topics with Delta tables, which may have to be cut back."""
    return has_unclean_elections(seed) and has_tiering(seed)


def has_compaction_and_tiering(seed: int) -> bool:
    """Topics that are compacted and have tables."""
    return has_compaction(seed) and not has_unclean_elections(seed) and has_tiering(seed)


def has_store_outages(seed: int) -> bool:
    """A metadata store that fails for a while."""
    return random.Random(f"{seed}/store outages draw").random() < store.SHARE


def has_clock_jumps(seed: int) -> bool:
    """Clocks that jump, unless it has transactions."""
    jumps = random.Random(f"{seed}/clock jumps draw").random() < clock_jumps.SHARE
    return jumps and not has_transactions(seed)
