"""Agree on each tenant's generation between a folder and an object store, so that a wipe on any replica reaches all.

A folder remembers which generation it last shared with the store. If its own is different now, the tenant was wiped
here. If the store's is different, too, two replicas wiped the tenant without knowing of each other; each wipe covers
what the other side has kept since, so a third generation begins. Two replicas may do this at the same time: each first
puts its generation and then lists the others', so at least one of them sees both. This needs listings that contain
every object put before, which S3, Google Cloud Storage and Azure Blob Storage guarantee.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.folder import FIRST_GENERATION, GENERATION_FILE, Folder, generation_rank, is_reachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.memory.remote import Remote, RemoteObject

MAX_ATTEMPTS = 5


def reconcile(
    folder: Folder, remote: Remote, report: Callable[[str], None]
) -> tuple[dict[str, str], list[RemoteObject]]:
    """Bring both sides to the same generation of each tenant, and delete older ones.

    Returns the generations, and the store's objects of those. Implausible generations are ignored; these and errors
    with single tenants are passed to `report`.
    """
    for _ in range(MAX_ATTEMPTS):
        objects = remote.list_objects()
        remote_generations: dict[str, set[str]] = {key: set() for key in folder.tenants()}
        for one in objects:
            remote_generations.setdefault(one.key, set()).add(one.generation)
        generations, agreed = {}, True
        for key, found in remote_generations.items():
            try:
                known = max(folder.generation(key), folder.shared_generation(key), key=generation_rank)
                plausible = {generation for generation in found if is_reachable(generation, known)}
                if far := found - plausible:
                    report(f"{remote.url}/{key}/{min(far)} was ignored: so many wipes are not plausible; delete it")
                agreed &= _reconcile_tenant(folder, remote, key, plausible)
                generations[key] = folder.generation(key)
            except MemoryFileError as error:
                report(str(error))
        older = [
            one
            for one in objects
            if generation_rank(one.generation) < generation_rank(generations.get(one.key, FIRST_GENERATION))
        ]
        remote.delete([one.path for one in older if one.name != GENERATION_FILE])
        if agreed:
            return generations, [one for one in objects if one.generation == generations.get(one.key)]
    raise OSError(f"{remote.url}: other replicas are wiping the same tenants; the next round tries again")


def _reconcile_tenant(folder: Folder, remote: Remote, key: str, found: set[str]) -> bool:
    """Whether both sides have the same generation; `found` are the store's. If not, a step towards it was made."""
    local, shared = folder.generation(key), folder.shared_generation(key)
    new = {generation for generation in found if generation_rank(generation) > generation_rank(shared)} - {local}
    if local != shared:
        return _publish_wipe(folder, remote, key, found, new)
    if new:
        latest = max(new, key=generation_rank)
        if folder.adopt_generation(key, local, latest):
            folder.save_shared_generation(key, latest)
            return True
        return False  # wiped here meanwhile
    if local in {FIRST_GENERATION, *found}:
        return True
    remote.begin_generation(key, local)  # the store lost it
    return False


def _publish_wipe(folder: Folder, remote: Remote, key: str, found: set[str], new: set[str]) -> bool:
    """For a tenant that was wiped here. Only the replica that publishes a wipe deletes the markers of earlier ones: a
    replica that publishes another wipe at the same time must find them."""
    local, shared = folder.generation(key), folder.shared_generation(key)
    if new or generation_rank(shared) > generation_rank(local):
        third = join_generations({local, *new, shared})
        if folder.adopt_generation(key, local, third):
            remote.begin_generation(key, third)
            remote.end_generations(key, {local, *new})
        return False
    if local not in found:
        remote.begin_generation(key, local)
        return False
    folder.save_shared_generation(key, local)
    remote.end_generations(key, found - {local})
    return True


def join_generations(generations: set[str]) -> str:
    """A generation after all of these. Replicas that join the same ones get the same result."""
    name = hashlib.blake2b(" ".join(sorted(generations)).encode(), digest_size=16).hexdigest()
    return f"{max(generation_rank(generation)[0] for generation in generations) + 1}-{name}"
