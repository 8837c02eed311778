"""Says who listens on a TCP port: port_owner.py PORT [ADDRESS].

Exit 0 and one line ("pid 12 (nginx)", or "a process of another user") when the port is taken, exit 1 when it is
free. Reads /proc, since tools like ss are not on every machine.
"""

import glob
import os
import socket
import sys

LISTEN = "0A"


def listening_inodes(port):
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == LISTEN and int(row[1].rsplit(":", 1)[1], 16) == port}
    return inodes


def owner(inodes):
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) in wanted:
                pid = link.split("/")[2]
                with open(f"/proc/{pid}/comm", encoding="utf-8") as name:
                    return f"pid {pid} ({name.read().strip()})"
        except OSError:
            continue
    return "a process of another user"


def bindable(address, port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def main():
    port, address = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    if bindable(address, port):
        sys.exit(1)
    print(owner(listening_inodes(port)))


if __name__ == "__main__":
    main()
