"""Adds up what test runners printed: count_tests.py LOG… prints "PASSED FAILED".

Knows libtest ("test result: ok. 3 passed; 0 failed; …"), unittest ("Ran 3 tests", "FAILED (failures=1)") and the
project's own total lines ("3 passed, 0 failed").
"""

import re
import sys

LIBTEST = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed;", re.MULTILINE)
UNITTEST = re.compile(r"^Ran (\d+) tests? in .*\n+(?:OK|FAILED)(?: \(([^)]*)\))?", re.MULTILINE)
TOTAL = re.compile(r"^(\d+) passed, (\d+) failed", re.MULTILINE)


def count(text):
    passed = failed = 0
    for good, bad in LIBTEST.findall(text) + TOTAL.findall(text):
        passed, failed = passed + int(good), failed + int(bad)
    for ran, notes in UNITTEST.findall(text):
        numbers = {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", notes)}
        bad = numbers.get("failures", 0) + numbers.get("errors", 0)
        passed, failed = passed + int(ran) - bad - numbers.get("skipped", 0), failed + bad
    return passed, failed


if __name__ == "__main__":
    totals = [0, 0]
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8", errors="replace") as log:
            totals = [total + more for total, more in zip(totals, count(log.read()))]
    print(*totals)
