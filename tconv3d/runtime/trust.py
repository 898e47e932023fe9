"""Whether a file can only have been written by this user, or by the system's administrator.

What a cache holds is run: cubins on the GPU, shared libraries in this process. So a directory counts only if it, and
every directory above it, belongs to this user or to root and cannot be written by others; the sticky bit, as on
/tmp, is enough above the directory itself, because there nobody can rename what is not theirs. A group that has the
user's name and no other member is the user alone.

Knows nothing of what the files are for.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows: directories of other users are protected by access lists that this does not read
    grp = pwd = None  # type: ignore[assignment]


def why_not_directory(directory: Path) -> str | None:
    """Why somebody else could have put files into a directory, in words; None if nobody could, or it is not there."""
    if pwd is None:
        return None
    for path in dict.fromkeys(
        (directory, *directory.parents, *directory.resolve().parents)
    ):  # links have two ways up
        try:
            found = os.stat(path)
        except OSError:  # it is not there, or nothing in it can be read
            continue
        if path is not directory and found.st_mode & stat.S_ISVTX:
            found = _without_writers(found)
        if (reason := why_not_file(found)) is not None:
            return f"{path} {reason}"
    return None


def why_not_file(found: os.stat_result) -> str | None:
    """Why somebody else could have written a file with this `stat`, in words; None if nobody could."""
    if pwd is None:
        return None
    me = os.geteuid()
    if found.st_uid not in (0, me):
        return f"belongs to user {found.st_uid}, and this process runs as user {me}"
    if found.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, me):
        return f"can be written by group {found.st_gid}"
    return None


def _without_writers(found: os.stat_result) -> os.stat_result:
    """A directory with the sticky bit: others can add files to it, but not replace those of this user."""
    return os.stat_result((found.st_mode & ~(stat.S_IWGRP | stat.S_IWOTH), *found[1:]))


def _is_private(group: int, user: int) -> bool:
    """Whether a group is the user's own, as many systems make one for every user. Root's group is root's."""
    if group == 0:
        return True
    try:
        name, members = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and set(members.gr_mem) <= {name}
