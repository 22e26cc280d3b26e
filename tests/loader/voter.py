"""A rank that votes, in a process of its own; one JSON object tells it how, and it tells the end.

``votes``: a list of each rank's ballot, a reason for "no" or none for "yes"; one list a round.
``die``: ``[rank, round, attempt]`` ends by SIGKILL before that vote. ``engine``: ``before`` or
``after`` the group, ``init_process_group`` is called as an engine would. ``late``: a rank that
comes to each meeting after the others, who so find what was left in the store until then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import torch.distributed as dist

from warmcast.loader.quorum import group_from_env
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError


def main() -> None:
    """Vote, round for round."""
    options = json.loads(sys.argv[1])
    engine = options.get("engine")
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    verdicts: list[object] = []
    told: dict[str, object] = {"verdicts": verdicts, "attempt": attempt}
    groups = []  # open to the end, as a loader's is
    try:
        if engine == "before":
            dist.init_process_group("gloo")
        for _ in range(options.get("groups", 1)):
            if os.environ["RANK"] == str(options.get("late")):
                threading.Event().wait(0.5)
            group = group_from_env(Deadline.after(options.get("seconds", 30)))
            groups.append(group)
            told["rank"] = group.rank
            for number, ballots in enumerate(options["votes"]):
                if options.get("die") == [group.rank, number, attempt]:
                    os.kill(os.getpid(), signal.SIGKILL)
                reason = ballots[group.rank]
                deadline = Deadline.after(options.get("seconds", 30))
                verdict = group.vote(reason is None, reason or "", deadline)
                verdicts.append([verdict.passed, verdict.reasons])
            told["first"] = group.first(f"rank {group.rank}", Deadline.after(30))
        if engine == "after":
            dist.init_process_group("gloo")
        if engine:
            dist.barrier()
            told["engine"] = dist.get_world_size()
            dist.destroy_process_group()
    except WarmcastError as cause:
        told |= {"error": type(cause).__name__, "message": str(cause)}
    for group in groups:
        group.close()
    # One write a line: ranks of torchrun share its standard output.
    os.write(1, (json.dumps(told) + "\n").encode())


if __name__ == "__main__":
    main()
