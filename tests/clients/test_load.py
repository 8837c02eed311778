"""The daemon under many clients at once, for a short while: scripts/bench.sh load is the long one."""

import os
import subprocess
import sys
import unittest

from support import ROOT, SMOLLM2

#: The bench's own bound is for a machine that does nothing else; this one tells a daemon that hangs.
HEALTH_MS = 100


class Load(unittest.TestCase):
    def test_nothing_is_lost_and_health_is_answered(self):
        words = ["--model", SMOLLM2, "--seconds", "8", "--warm", "4", "--health-ms", str(HEALTH_MS)]
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/lib/bench_load.py", *words], env=os.environ, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=600, check=False,
        )
        print(done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    unittest.main()
