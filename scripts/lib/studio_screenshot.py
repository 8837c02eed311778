"""Takes the picture of the studio: studio_screenshot.py FILE.png. Run by scripts/studio-screenshot.sh."""

import pathlib
import sys
import tempfile

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/studio"))
from browser import chromium
from daemon import Daemon

QUESTIONS = ["What is the capital of France?", "List the months of the year."]
#: With these the last answer takes some thirty steps, as even a miniature must search when it is as hot as can be.
TEMPERATURE, SEED = "End", "6"
#: Where in the recording the picture is taken.
MOMENT = 0.12
#: Bytes of a picture that a reader waits for.
MOST = 300 << 10


def take(url, target):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**chromium())
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="dark")
        page.goto(url)
        expect(page.locator("#state")).to_have_attribute("data-state", "ready")
        page.locator("#temperature").press(TEMPERATURE)
        page.locator("#seed").fill(SEED)
        page.locator("#seed").press("Tab")
        answers = page.locator(".message.answer")
        for at, question in enumerate(QUESTIONS):
            page.locator("#prompt").fill(question)
            page.locator("#send").click()
            expect(answers.nth(at).locator(".facts")).to_be_visible(timeout=60_000)
        scrubber = answers.last.get_by_label("Replay of the draft")
        last = int(scrubber.get_attribute("max"))
        scrubber.press("Home")
        for _ in range(round(MOMENT * last)):
            scrubber.press("ArrowRight")
        assert answers.last.locator(".token").count() > 10, "the draft is not shown"
        page.locator("#talk").evaluate("talk => { talk.scrollTop = talk.scrollHeight; }")
        page.wait_for_timeout(800)  # until colours have settled
        page.screenshot(path=target)
        browser.close()


def main():
    target = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="axe-studio-") as folder:
        daemon = Daemon(pathlib.Path(folder), "daemon")
        try:
            daemon.wait()
            take(daemon.url, target)
        finally:
            daemon.stop()
    size = target.stat().st_size
    if size > MOST:
        sys.exit(f"{target} has {size} bytes, more than {MOST}")
    print(f"{target}: {size} bytes")


if __name__ == "__main__":
    main()
