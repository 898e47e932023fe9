"""Tells whether only this user or the system's administrator can have written a file.

The content of a cache is executed: cubins on the GPU, shared libraries in this process. Therefore a directory is
trusted only if it and every directory above it belong to this user or to root, and other users cannot write them. A
directory above may be writable if it has the sticky bit, like /tmp, because then users can only rename files of their
own. A group that has the user's name and no other member counts as the user.

This module knows nothing of what the files are for.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows protects directories by access lists, which this module does not read
    grp = pwd = None  # type: ignore[assignment]


def why_not_directory(directory: Path) -> str | None:
    """Says why another user could have put files into a directory; None if nobody could, or it does not exist."""
    if pwd is None:
        return None
    for path in dict.fromkeys(
        (directory, *directory.parents, *directory.resolve().parents)
    ):  # a symbolic link has two chains of parents
        try:
            found = os.stat(path)
        except OSError:  # the path does not exist, or this user cannot read it
            continue
        if path is not directory and found.st_mode & stat.S_ISVTX:
            found = _without_writers(found)
        if (reason := why_not_file(found)) is not None:
            return f"{path} {reason}"
    return None


def why_not_file(found: os.stat_result) -> str | None:
    """Says why another user could have written a file with this `stat`; None if nobody could."""
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
    """Returns the `stat` without write permissions of others: a sticky bit protects existing files of this user."""
    return os.stat_result((found.st_mode & ~(stat.S_IWGRP | stat.S_IWOTH), *found[1:]))


def _is_private(group: int, user: int) -> bool:
    """Tells whether a group has no member but the user, as many systems create for every user, or is root's group."""
    if group == 0:
        return True
    try:
        name, members = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and set(members.gr_mem) <= {name}
