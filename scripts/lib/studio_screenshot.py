"""Takes the pictures of the studio's pages: studio_screenshot.py FOLDER. Run by scripts/studio-screenshot.sh."""

import pathlib
import sys
import tempfile

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/studio"))
from browser import chromium
from daemon import Daemon

QUESTIONS = ["What is the capital of France?", "List the months of the year."]
SAMPLE = "Missing months"
#: With these answers take some thirty steps, as even a miniature must search when it is as hot as can be.
TEMPERATURE, SEED = "End", "6"
#: Where in the recording of an answer its picture is taken.
MOMENT = 0.12
#: Bytes of a picture that a reader waits for.
MOST = 300 << 10


def opened(browser, url, height):
    """A page of the studio that is set to search for long."""
    page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="dark")
    page.goto(url)
    expect(page.locator("#state")).to_have_attribute("data-state", "ready")
    page.locator("#temperature").press(TEMPERATURE)
    page.locator("#seed").fill(SEED)
    page.locator("#seed").press("Tab")
    return page


def rewound(scrubber, steps):
    """Shows the draft after so many steps."""
    scrubber.press("Home")
    for _ in range(steps):
        scrubber.press("ArrowRight")
    scrubber.blur()


def chat(browser, url, target):
    """An answer in mid-replay."""
    page = opened(browser, url, 800)
    answers = page.locator(".message.answer")
    for at, question in enumerate(QUESTIONS):
        page.locator("#prompt").fill(question)
        page.locator("#send").click()
        expect(answers.nth(at).locator(".facts")).to_be_visible(timeout=60_000)
    scrubber = answers.last.get_by_label("Replay of the draft")
    rewound(scrubber, round(MOMENT * int(scrubber.get_attribute("max"))))
    assert answers.last.locator(".token").count() > 10, "the draft is not shown"
    page.locator("#talk").evaluate("talk => { talk.scrollTop = talk.scrollHeight; }")
    picture(page, target)


def editor(browser, url, target):
    """What an edit has changed, to be taken or not."""
    page = opened(browser, f"{url}/edit", 560)
    page.get_by_role("button", name=SAMPLE, exact=True).click()
    page.locator("#send").click()
    expect(page.get_by_role("button", name="Accept", exact=True)).to_be_visible(timeout=60_000)
    expect(page.locator("#diff ins b").first).to_be_visible()
    picture(page, target)


def picture(page, target):
    page.wait_for_timeout(800)  # until colours have settled
    page.screenshot(path=target)
    size = target.stat().st_size
    if size > MOST:
        sys.exit(f"{target} has {size} bytes, more than {MOST}")
    print(f"{target}: {size} bytes")


def main():
    folder = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="axe-studio-") as place, sync_playwright() as playwright:
        daemon = Daemon(pathlib.Path(place), "daemon")
        browser = playwright.chromium.launch(**chromium())
        try:
            daemon.wait()
            chat(browser, daemon.url, folder / "studio.png")
            editor(browser, daemon.url, folder / "edit.png")
        finally:
            browser.close()
            daemon.stop()


if __name__ == "__main__":
    main()
