"""A browser over real daemons with the miniature: what the tests of both of the studio's pages share.

environment:
    AXE_TEST_DAEMON      the daemon to start (target/release/axed, else target/debug/axed)
    AXE_STUDIO_CHROMIUM  the browser (/usr/bin/chromium)
"""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts/lib"))
from daemon import Daemon  # noqa: E402 (the path comes first)

#: Milliseconds for anything to show.
PATIENCE = 20_000


def chromium():
    """How Playwright is to launch the browser; root, as in containers, has no sandbox."""
    return {"executable_path": os.environ.get("AXE_STUDIO_CHROMIUM", "/usr/bin/chromium"), "args": ["--no-sandbox"]}


def begin():
    """Starts a daemon, another one that is its second backend, and the browser, until the tests of the module are over.

    Returns the two daemons.
    """
    global daemon, browser
    folder = pathlib.Path(tempfile.mkdtemp(prefix="axe-studio-"))
    unittest.addModuleCleanup(shutil.rmtree, folder, ignore_errors=True)
    other = Daemon(folder, "other")
    unittest.addModuleCleanup(other.stop)
    # One after the other, so that the second finds the first one's kernels.
    other.wait()
    daemon = Daemon(folder, "daemon", NVIDIA_BASE_URL=f"{other.url}/v1", NVIDIA_MODEL="tiny-diffusion")
    unittest.addModuleCleanup(daemon.stop)
    daemon.wait()
    playwright = sync_playwright().start()
    unittest.addModuleCleanup(playwright.stop)
    browser = playwright.chromium.launch(**chromium())
    unittest.addModuleCleanup(browser.close)
    return daemon, other


class Page(unittest.TestCase):
    """A fresh browser profile with a page of the studio open; complaints of the browser fail the test."""

    #: The page.
    PATH = "/"

    VIEW = {"viewport": {"width": 1280, "height": 800}}

    def setUp(self):
        self.context = browser.new_context(**self.VIEW)
        self.addCleanup(self.context.close)
        self.context.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        self.complaints = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("console", self.hear)
        self.addCleanup(lambda: self.assertEqual(self.complaints, []))
        self.open()

    def hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def open(self):
        self.page.goto(daemon.url + self.PATH)
        expect(self.page.locator("#state")).to_have_attribute("data-state", "ready")

    def hot(self):
        """Makes the next answers take some thirty steps: the miniature is so quick that of two, none may be seen."""
        self.page.locator("#temperature").evaluate("""(slider) => {
            slider.value = slider.max;
            slider.dispatchEvent(new Event("change"));
        }""")

    def axe_core(self):
        """Opens the page anew with axe-core in it. Its policy allows no foreign script; this is none of the page's."""
        self.context.add_init_script(path=axe_core())
        self.open()

    def check(self, when):
        self.page.wait_for_timeout(700)  # colours that are on their way count as they are
        found = self.page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        grave = [
            f"{fault['id']}: {fault['help']}: {[node['html'] for node in fault['nodes']][:3]}"
            for fault in found if fault["impact"] in ("serious", "critical")
        ]
        self.assertEqual(grave, [], when)


class Chat(Page):
    """The chat page."""

    def answers(self):
        return self.page.locator(".message.answer")

    def ask(self, text):
        """Types and clicks, and waits for the end of the answer."""
        before = self.answers().count()
        self.page.locator("#prompt").fill(text)
        self.page.get_by_role("button", name="Send").click()
        return self.finished(before)

    def finished(self, before):
        answer = self.answers().nth(before)
        expect(answer.locator(".facts")).to_be_visible()
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()
        return answer

    def told(self, answer):
        return answer.locator(".settled").inner_text()

    def long_answer(self):
        """Makes the next answers go on for seconds: they do not end by themselves, and are as hot as can be."""

        def ignore_eos(route):
            body = json.loads(route.request.post_data) | {"ignore_eos": True, "max_tokens": 1900}
            route.continue_(post_data=json.dumps(body))

        self.page.route("**/chat", ignore_eos)
        self.page.get_by_label("Temperature").press("End")


def axe_core():
    """The file of axe-core that the package axe-playwright-python brings."""
    place = importlib.util.find_spec("axe_playwright_python").submodule_search_locations[0]
    return next(pathlib.Path(place).rglob("axe.min.js"))
