"""The studio in a real browser, over real daemons with the miniature: what a reader clicks, types and sees.

Run by `scripts/test.sh studio`, which brings Chromium, Playwright and axe-core; by hand, with those two packages in the
Python in use:

    python3 -m unittest discover -s tests/studio

browser.py says what it takes from the environment.
"""

import json
import pathlib
import re
import sys
import time
import unittest

from playwright.sync_api import expect

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import browser  # noqa: E402 (the path comes first)
from browser import PATIENCE  # noqa: E402
from browser import Chat as Page  # noqa: E402

MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December."
#: Counts the tokens of drafts that were on the page, however short.
WATCH_DRAFTS = """() => {
    window.seen = { tokens: 0, texts: 0 };
    new MutationObserver((records) => {
        for (const record of records) {
            for (const node of record.addedNodes) if (node.classList?.contains("token")) window.seen.tokens += 1;
            if (record.target.classList?.contains("token")) window.seen.texts += 1;
        }
    }).observe(document.getElementById("messages"), { subtree: true, childList: true, characterData: true });
}"""

#: An answer whose every part is markup that would do something.
MARKUP = '<script>window.owned = 1</script><img src="x" onerror="window.owned = 2">'


def setUpModule():
    global daemon, other
    daemon, other = browser.begin()


class Answers(Page):
    def test_an_answer_is_drafted_settles_and_is_the_models(self):
        self.page.get_by_label("Temperature").press("End")
        self.page.get_by_label("Seed", exact=True).fill("6")
        self.page.get_by_label("Seed", exact=True).press("Tab")
        self.page.evaluate(WATCH_DRAFTS)
        answer = self.ask("List the months of the year.")
        self.assertEqual(self.told(answer), MONTHS)
        seen = self.page.evaluate("window.seen")
        self.assertGreater(seen["tokens"], 10, "tokens of a draft were on the page")
        self.assertEqual(answer.locator(".token").count(), 0, "and gave way to the text")
        facts = answer.locator(".facts").inner_text().lower()
        for name in ("steps", "tok/s", "seed", "first draft"):
            self.assertIn(name, facts)

    def test_the_conversation_goes_on(self):
        self.ask("What is the capital of France?")
        with self.page.expect_request("**/chat") as asked:
            self.ask("What is the capital of Italy?")
        roles = [message["role"] for message in asked.value.post_data_json["messages"]]
        self.assertEqual(roles, ["user", "assistant", "user"])
        self.assertEqual(self.answers().count(), 2)

    def test_a_starter_is_a_question(self):
        self.page.get_by_role("button", name="List the months of the year.").click()
        self.assertEqual(self.told(self.finished(0)), MONTHS)

    def test_the_same_seed_gives_the_same_answer(self):
        self.page.get_by_label("Temperature").press("End")
        text = self.told(self.ask("Write three lines about rain."))
        self.page.get_by_role("button", name="last").click()
        seed = self.page.get_by_label("Seed", exact=True).input_value()
        self.assertRegex(seed, r"^\d+$")
        self.page.get_by_role("button", name="New chat").first.click()
        again = self.ask("Write three lines about rain.")
        self.assertEqual(self.told(again), text)
        self.assertIn(seed, again.locator(".facts").inner_text())

    def test_stop_frees_the_slot(self):
        self.long_answer()
        cancelled = daemon.figure('axe_requests_total{outcome="cancelled"}')
        self.page.locator("#prompt").fill("Write three lines about rain.")
        self.page.get_by_role("button", name="Send").click()
        expect(self.page.locator(".draft .token").first).to_be_visible()
        expect(self.page.locator("#state")).to_have_attribute("data-state", "busy")
        self.page.get_by_role("button", name="Stop").click()
        answer = self.finished(0)
        expect(answer.locator(".facts")).to_contain_text("stopped")
        self.assertEqual(answer.locator(".token").count(), 0)
        end = time.monotonic() + PATIENCE / 1000
        figures = lambda: (daemon.figure("axe_running"), daemon.figure('axe_requests_total{outcome="cancelled"}'))
        while figures() != (0, cancelled + 1) and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(figures(), (0, cancelled + 1))
        self.page.unroute("**/chat")
        self.page.get_by_label("Temperature").press("Home")
        self.page.get_by_role("button", name="New chat").first.click()
        self.assertEqual(self.told(self.ask("List the months of the year.")), MONTHS)

    def test_an_error_is_shown_and_the_next_answer_works(self):
        self.page.get_by_label("Most tokens").fill("100000000")
        self.page.get_by_label("Most tokens").press("Tab")
        self.page.locator("#prompt").fill("hello")
        self.page.get_by_role("button", name="Send").click()
        expect(self.page.get_by_role("alert")).to_contain_text("max_tokens")
        # The browser itself notes that the request was refused.
        self.assertTrue(self.complaints and all("400" in told for told in self.complaints), self.complaints)
        self.complaints.clear()
        self.page.get_by_label("Most tokens").fill("64")
        self.page.get_by_label("Most tokens").press("Tab")
        self.assertEqual(self.told(self.ask("List the months of the year.")), MONTHS)


class Replay(Page):
    def step(self, answer):
        """The step that is shown. A page that is slow to read is not sent every step, so which ones there are is open."""
        place = re.compile(r"canvas 1 · step (\d+)")
        expect(answer.locator(".replay output")).to_contain_text(place)
        return int(place.search(answer.locator(".replay output").inner_text())[1])

    def test_the_scrubber_goes_back_to_the_draft_and_forth(self):
        self.page.get_by_label("Temperature").press("End")
        self.page.get_by_label("Seed", exact=True).fill("7")
        self.page.get_by_label("Seed", exact=True).press("Tab")
        answer = self.ask("Write three lines about rain.")
        text = self.told(answer)
        scrubber = answer.get_by_label("Replay of the draft")
        expect(scrubber).to_be_visible()
        box = scrubber.bounding_box()
        self.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.assertGreater(answer.locator(".token").count(), 10)
        middle, draft = self.step(answer), answer.locator(".draft").inner_html()
        scrubber.press("Home")
        self.assertLess(self.step(answer), middle)
        self.assertNotEqual(answer.locator(".draft").inner_html(), draft)
        scrubber.press("ArrowRight")
        self.assertLess(self.step(answer), middle)
        scrubber.press("End")
        expect(answer.locator(".replay output")).to_contain_text("as it stands")
        self.assertEqual(answer.locator(".token").count(), 0)
        self.assertEqual(self.told(answer), text)
        # And by itself.
        self.page.evaluate(WATCH_DRAFTS)
        answer.get_by_role("button", name="Play the drafts").click()
        expect(answer.get_by_role("button", name="Pause")).to_be_visible()
        expect(answer.locator(".replay output")).to_contain_text("as it stands")
        self.assertGreater(self.page.evaluate("window.seen.tokens"), 10)

    def test_chats_and_their_drafts_survive_a_reload(self):
        self.ask("List the months of the year.")
        self.page.get_by_label("Temperature").press("End")
        self.page.get_by_role("button", name="New chat").first.click()
        text = self.told(self.ask("Write three lines about rain."))
        self.open()
        expect(self.page.locator("#chat-list button")).to_have_count(2)
        self.assertEqual(self.told(self.answers().first), text)
        self.assertEqual(float(self.page.get_by_label("Temperature").input_value()), 2)
        scrubber = self.answers().first.get_by_label("Replay of the draft")
        scrubber.press("Home")
        self.assertGreater(self.answers().first.locator(".token").count(), 0)
        self.page.get_by_role("button", name="List the months").click()
        self.assertEqual(self.told(self.answers().first), MONTHS)
        self.page.get_by_role("button", name="Delete chat").click()
        expect(self.page.locator("#chat-list button")).to_have_count(1)
        self.open()
        expect(self.page.locator("#chat-list button")).to_have_count(1)


class Backends(Page):
    def test_another_server_answers_and_keeps_its_own_chats(self):
        self.ask("What is the capital of France?")
        before = other.figure('axe_requests_total{outcome="stop"}')
        self.page.get_by_label("Model to talk to").select_option("remote")
        expect(self.answers()).to_have_count(0)
        expect(self.page.locator("#steps-row")).to_be_hidden()
        answer = self.ask("List the months of the year.")
        self.assertEqual(self.told(answer), MONTHS)
        self.assertEqual(answer.locator(".replay").count(), 0, "it has no drafts")
        self.assertEqual(other.figure('axe_requests_total{outcome="stop"}'), before + 1)
        self.open()
        self.assertEqual(self.page.get_by_label("Model to talk to").input_value(), "remote")
        self.assertEqual(self.told(self.answers().first), MONTHS)
        self.page.get_by_label("Model to talk to").select_option("local")
        expect(self.page.locator(".message.user")).to_have_text("What is the capital of France?")


class Safety(Page):
    def test_another_model_is_taken_up(self):
        expect(self.page.locator("#steps-row")).to_be_visible()
        ready = {"status": "ready", "model": "another"}
        causal = {
            "id": "local", "name": "another", "kind": "causal", "chat": True, "thinking": False,
            "defaults": {"max_tokens": 5, "temperature": 0.5}, "about": "another model",
        }
        self.page.route("**/ready", lambda route: route.fulfill(json=ready))
        self.page.route("**/studio/backends", lambda route: route.fulfill(json={"backends": [causal]}))
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(self.page.locator("#steps-row")).to_be_hidden()
        expect(self.page.locator("#about")).to_have_text("another model")
        with self.page.expect_request("**/chat") as asked:
            self.page.locator("#prompt").fill("hello")
            self.page.get_by_role("button", name="Send").click()
        self.assertNotIn("steps", asked.value.post_data_json)
        self.finished(0)

    def test_what_is_written_before_the_server_tells_anything_stays(self):
        refusal = {"error": {"message": "an API key is needed", "type": "invalid_request_error"}}
        self.page.route("**/studio/backends", lambda route: route.fulfill(status=401, json=refusal))
        self.page.goto(daemon.url + self.PATH)
        expect(self.page.locator("#settings")).to_have_class(re.compile(r"\bopen\b"))
        self.page.locator("#prompt").fill("hello")
        self.page.locator("#prompt").press("Enter")
        expect(self.page.locator(".toast")).to_contain_text("stays here")
        expect(self.page.locator("#prompt")).to_have_value("hello")
        self.page.unroute("**/studio/backends")
        expect(self.page.locator("#state")).to_have_attribute("data-state", "ready")
        # The browser tells of each answer that was no success.
        self.assertTrue(all("401" in complaint for complaint in self.complaints), self.complaints)
        self.complaints.clear()

    def test_markup_in_questions_drafts_and_answers_stays_text(self):
        draft = {"canvas": 0, "step": 1, "tokens": [MARKUP, None, MARKUP], "entropy": [0.1, 0.2, 3.0]}
        done = {"finish_reason": MARKUP, "usage": {"completion_tokens": 3}, "stats": {"denoising_steps": 2}, "seed": MARKUP}
        events = [
            ("draft", draft), ("draft", draft | {"step": 2}), ("commit", {"text": MARKUP, "reasoning": MARKUP, "tokens": 3}),
            ("done", done),
        ]
        stream = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
        self.page.route("**/chat", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
        answer = self.ask(MARKUP)
        self.assertEqual(self.told(answer), MARKUP)
        expect(self.page.locator(".message.user")).to_have_text(MARKUP)
        answer.get_by_label("Replay of the draft").press("Home")
        self.assertEqual(answer.locator(".token").first.inner_text(), MARKUP)
        self.open()
        self.assertEqual(self.told(self.answers().first), MARKUP)
        self.assertEqual(self.page.locator("main img, main script").count(), 0)
        self.assertIsNone(self.page.evaluate("window.owned ?? null"))

    def test_nothing_inline_runs(self):
        """The policy is what would stop markup if a mistake let it through."""
        self.page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.owned = 1";
            document.body.append(script);
        }""")
        self.assertIsNone(self.page.evaluate("window.owned ?? null"))
        self.assertTrue(any("Content Security Policy" in told for told in self.complaints), self.complaints)
        self.complaints.clear()


class Keyboard(Page):
    def test_everything_can_be_done_without_a_mouse(self):
        keyboard = self.page.keyboard
        expect(self.page.locator("#prompt")).to_be_focused()
        keyboard.type("List the months")
        keyboard.press("Shift+Enter")
        keyboard.type("of the year.")
        self.assertEqual(self.page.locator("#prompt").input_value(), "List the months\nof the year.")
        keyboard.press("Control+A")
        keyboard.type("List the months of the year.")
        keyboard.press("Enter")
        answer = self.finished(0)
        self.assertEqual(self.told(answer), MONTHS)
        reached = set()
        for _ in range(60):
            keyboard.press("Tab")
            reached.add(self.page.evaluate("""() => {
                const at = document.activeElement;
                return at.id || at.getAttribute("aria-label") || at.textContent.trim().slice(0, 40);
            }"""))
        for name in ("backend", "new-chat", "export", "forget", "prompt", "send", "system", "temperature", "steps",
                     "max-tokens", "seed", "seed-again", "key", "Copy"):
            self.assertIn(name, reached)

    def test_escape_stops(self):
        self.long_answer()
        self.page.locator("#prompt").focus()
        self.page.keyboard.type("Write three lines about rain.")
        self.page.keyboard.press("Enter")
        expect(self.page.locator(".draft .token").first).to_be_visible()
        self.page.keyboard.press("Escape")
        expect(self.finished(0).locator(".facts")).to_contain_text("stopped")


class Phone(Page):
    VIEW = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}

    def test_it_fits_and_its_panels_open_by_a_tap(self):
        self.page.locator("#prompt").fill("List the months of the year.")
        self.page.get_by_role("button", name="Send").tap()
        self.assertEqual(self.told(self.finished(0)), MONTHS)
        wide = self.page.evaluate("document.documentElement.scrollWidth")
        self.assertLessEqual(wide, 360, "nothing sticks out to the side")
        expect(self.page.locator("#settings")).to_be_hidden()
        self.page.get_by_role("button", name="Settings").tap()
        expect(self.page.get_by_label("Temperature")).to_be_visible()
        self.page.get_by_role("button", name="Settings").tap()
        expect(self.page.locator("#settings")).to_be_hidden()
        self.page.get_by_role("button", name="Chats").tap()
        expect(self.page.locator("#chats")).to_be_visible()
        self.page.locator("#new-chat").tap()
        expect(self.page.locator("#chats")).to_be_hidden()
        expect(self.answers()).to_have_count(0)


class Accessible:
    """axe-core finds nothing serious, before, during and after an answer."""

    def test_axe_core_finds_nothing_serious(self):
        self.axe_core()
        self.check("empty")
        self.hot()
        answer = self.ask("List the months of the year.")
        self.check("answered")
        answer.get_by_label("Replay of the draft").press("Home")
        self.check("replayed")
        for name in ("Chats", "Settings"):
            opener = self.page.get_by_role("button", name=name)
            if opener.count() and opener.is_visible():
                opener.click()
                self.check(name)
                opener.click()


class AccessibleLight(Accessible, Page):
    VIEW = Page.VIEW | {"color_scheme": "light"}


class AccessibleDark(Accessible, Page):
    VIEW = Page.VIEW | {"color_scheme": "dark"}


class AccessiblePhone(Accessible, Page):
    VIEW = Phone.VIEW | {"color_scheme": "dark"}


if __name__ == "__main__":
    unittest.main()
