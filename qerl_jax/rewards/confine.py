"""Runs an untrusted program after dropping every privilege it must not have. `sandbox.run` starts this file as a
script. Linux on x86-64 or aarch64; standard library only.

Each layer is enforced by the kernel, not by Python, and the program cannot undo it:

| layer | guarantee |
|---|---|
| limits | CPU seconds, address space, size of a file (standard output included), open files, threads, no core dump |
| own directory | a tmpfs with a quota of bytes and files, deleted ones included, where a user namespace can be had; |
| | elsewhere `sandbox` counts both, and threads, twenty times a second |
| no capabilities, no new privileges | even as root the program has the rights of an ordinary user |
| Landlock | read access to Python and the system's libraries, write access to its own directory, no other files |
| seccomp | no new process or program, no socket, no signal to and no inspection of other processes, |
| | no change of file modes, owners, times, attributes or resource limits, no watching of other directories; |
| | `prctl` and `ioctl` for a few harmless requests alone |

The program can compute, use threads (not asyncio, which needs a socket), and read and write its own directory.
Remaining risks: an exploit of a permitted system call, reading files beside Python's libraries, learning that a path
exists, and using CPU and memory up to the limits. Use a virtual machine against a serious attacker.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import struct
import sys
from typing import Any

# Linux's numbers, from its headers (linux/prctl.h, landlock.h, seccomp.h, audit.h, capability.h).
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PRCTL_ALLOWED = (3, 15, 16, 0x53564D41)  # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (a name for memory)
_IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FION/FIOCLEX
_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000  # unshare
_PRIVATE_MOUNTS, _NOSUID_NODEV = (1 << 14) | (1 << 18), 2 | 4
_SIGKILL = 9
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # access kinds known to each Landlock version
_CAPABILITY_VERSION = 0x20080522
_ALLOW, _KILL, _EPERM, _ENOTTY, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050019, 0x00050026
_LAST_KNOWN = 466  # higher system calls are newer than this table: the program gets ENOSYS
_THREAD = 0x10000  # CLONE_THREAD
_OWNERS = (8, 10, 15)  # fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to other processes

# Refused calls by name: their numbers on (x86-64, aarch64); None where the call does not exist.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes and programs
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    # sockets, and io_uring, which could open them
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425),
    # signals to other processes, inspecting them, changing them
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory outside the limits
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # not covered by Landlock: length, mode, owner, times and attributes of a file by its name
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    # watching other directories
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # access to more of the kernel
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
# Calls allowed or refused by their arguments.
_DECIDED = {
    "clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261), "tgkill": (234, 131), "fcntl": (72, 25),
    "prctl": (157, 167), "ioctl": (16, 29),
}  # fmt: skip
_AUDIT = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # machine: column of these tables, audit number


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def set_limits(limits: dict[str, int]) -> None:
    """Kernel limits by resource name ("AS", "CPU", …), soft and hard alike."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def own_directory(libc: ctypes.CDLL, size: int, files: int) -> bool:
    """Mount a tmpfs of `size` bytes and `files` files over the working directory, for this process alone. Returns
    whether that can be had: it takes a user namespace, which some systems and containers refuse.
    """
    directory, user, group = os.getcwd(), os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        if libc.mount(None, b"/", None, _PRIVATE_MOUNTS, None):
            return False
        options = f"size={size},nr_inodes={files + 1},mode=700".encode()
        if libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", _NOSUID_NODEV, options):
            return False
        os.chdir(directory)
    except OSError:
        return False
    return True


def limit_threads(count: int, is_alone: bool) -> None:
    """At most `count` threads of this user. The kernel counts all of a user's threads, in a user namespace of its own
    (`is_alone`) those of that namespace; elsewhere the limit is `count` more than the whole system has. Root's are not
    counted.
    """
    with open("/proc/loadavg", encoding="ascii") as file:
        others = 0 if is_alone else int(file.read().split()[3].partition("/")[2])
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    set_limits({"NPROC": others + count if hard < 0 else min(hard, others + count)})


def drop_privileges(libc: ctypes.CDLL) -> None:
    """Drop all capabilities and the ability to gain any."""
    _checked("no_new_privs", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    _checked("capset", libc.capset(header, ctypes.create_string_buffer(24)))


def restrict_files(libc: ctypes.CDLL, readable: list[str], writable: str) -> None:
    """Landlock: files under `readable` can be read, those under `writable` also written; no other file is accessible.

    Raises OSError where the kernel has no Landlock or it is disabled.
    """
    version = _checked("Landlock", libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    handled = (1 << _FS_BITS[min(version, 5)]) - 1
    net, scopes = 3 * (version >= 4), 3 * (version >= 6)  # TCP; abstract sockets and signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = ctypes.create_string_buffer(struct.pack("=QQQ", handled, net, scopes), 24)
    ruleset = _checked("Landlock", libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0))
    write = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    for path, access in [(path, _READ_FILE | _READ_DIR) for path in readable] + [(writable, write & handled)]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        access &= ~0 if os.path.isdir(path) else ~_READ_DIR
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor), 12)
        _checked(f"Landlock on {path}", libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(descriptor)
    _checked("Landlock", libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def filter_program(machine: str, pid: int) -> bytes:
    """The seccomp filter as classic BPF over `struct seccomp_data`: listed calls fail with EPERM, some calls depend on
    their first or second argument, all others pass. Raises OSError on a machine without a table of call numbers.
    """
    if machine not in _AUDIT:
        raise OSError(f"seccomp: no table of system calls for {machine!r}, only for {sorted(_AUDIT)}")
    column, audit = _AUDIT[machine]
    refused = [numbers[column] for numbers in _REFUSED.values() if numbers[column] is not None]
    special = {name: numbers[column] for name, numbers in _DECIDED.items()}

    def load(offset: int) -> tuple[int, int, int, int]:
        return (0x20, 0, 0, offset)

    def answer(value: int) -> tuple[int, int, int, int]:
        return (0x06, 0, 0, value)

    def unless(test: int, value: int, then: tuple) -> list[tuple]:
        """`then` where the loaded value passes the test (0x15 equal, 0x35 at least, 0x45 any bit)."""
        return [(test, 0, 1, value), then]

    def decided(call: int, offset: int, tests: list[tuple], otherwise: int) -> list[tuple]:
        body = [load(offset), *tests, answer(otherwise)]
        return [(0x15, 0, len(body), call), *body]

    first, second = 16, 24  # low halves of the arguments
    code = [load(4), (0x15, 1, 0, audit), answer(_KILL), load(0), *unless(0x35, _LAST_KNOWN + 1, answer(_ENOSYS))]
    for call in refused:
        code += unless(0x15, call, answer(_EPERM))
    code += unless(0x15, special["clone3"], answer(_ENOSYS))  # libc then uses clone, whose flags are visible
    code += decided(special["clone"], first, unless(0x45, _THREAD, answer(_ALLOW)), _EPERM)
    code += decided(special["prlimit64"], first, unless(0x15, 0, answer(_ALLOW)), _EPERM)
    code += decided(special["tgkill"], first, unless(0x15, pid, answer(_ALLOW)), _EPERM)
    owners = [line for command in _OWNERS for line in unless(0x15, command, answer(_EPERM))]
    code += decided(special["fcntl"], second, owners, _ALLOW)
    for call, offset, allowed, otherwise in (
        ("prctl", first, _PRCTL_ALLOWED, _EPERM),
        ("ioctl", second, _IOCTL_ALLOWED, _ENOTTY),
    ):
        tests = [line for request in allowed for line in unless(0x15, request, answer(_ALLOW))]
        code += decided(special[call], offset, tests, otherwise)
    code.append(answer(_ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def restrict_calls(libc: ctypes.CDLL) -> None:
    """Install the seccomp filter. Raises OSError where the kernel has no seccomp."""
    code = filter_program(os.uname().machine, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    _checked("seccomp", libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0))


def confine(job: dict[str, Any]) -> None:
    """Apply all layers, irreversibly. Raises OSError naming the first layer that is unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    has_quota = own_directory(libc, job["directory"]["bytes"], job["directory"]["files"])
    limit_threads(job["threads"], is_alone=has_quota)
    _checked("parent death signal", libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))
    if os.getppid() != job["parent"]:
        os._exit(1)  # it died before the signal was set
    set_limits(job["limits"])
    drop_privileges(libc)
    restrict_files(libc, job["readable"], os.getcwd())
    restrict_calls(libc)


def run_program(text: str, call: dict[str, Any] | None) -> None:
    """Run the text as a program. With `call`, call the named function (of the module, or a method of `Solution`) and
    write its result as JSON to standard output; the program's own output is then discarded.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    answers = sys.stdout
    if call is not None:
        sys.stdout = io.StringIO()
    exec(compile(text, "program.py", "exec"), namespace)
    if call is not None:
        name = call["name"]
        function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
        json.dump(function(*call["arguments"]), answers)
    answers.flush()


def main() -> None:
    """`confine.py JOB STATUS`: file descriptors of the job (JSON) and of a pipe that receives "ok" once all layers are
    in place, or the reason why one is not.
    """
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        job = json.load(file)
    with open(int(sys.argv[2]), "w", encoding="utf-8") as status:
        try:
            confine(job)
        except (OSError, ValueError) as error:
            status.write(str(error))
            return
        status.write("ok")
    run_program(job["program"], job["call"])


if __name__ == "__main__":
    main()
