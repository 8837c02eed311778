"""The studio's editor in a real browser, over a real daemon with the miniature: select, edit, watch, accept, undo, stop.

Run with the tests of the chat page by `scripts/test.sh studio`; see test_studio.py.
"""

import json
import pathlib
import sys
import threading
import time
import unittest
import urllib.request

from playwright.sync_api import expect

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import browser  # noqa: E402 (the path comes first)
from browser import PATIENCE  # noqa: E402

SOME = "January, February, March, August, September, October, November, December."
GAP = len("January, February, March,")
MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December."

#: Counts the tokens of drafts that were on the paper, and notes every shade and every text around the gap.
WATCH_DRAFTS = """() => {
    window.seen = { tokens: 0, shades: [], around: [] };
    new MutationObserver(() => {
        const tokens = document.querySelectorAll("#draft .token");
        window.seen.tokens = Math.max(window.seen.tokens, tokens.length);
        for (const token of tokens) for (const name of token.classList) if (/^h\\d$/.test(name)) window.seen.shades.push(name);
        const around = [...document.querySelectorAll("#draft .around")].map((node) => node.textContent);
        if (around.length) window.seen.around.push(around.join("|"));
    }).observe(document.getElementById("draft"), { subtree: true, childList: true, characterData: true, attributes: true });
}"""

#: A text whose every part is markup that would do something.
MARKUP = '<script>window.owned = 1</script><img src="x" onerror="window.owned = 2">'


def setUpModule():
    global daemon
    daemon, _ = browser.begin()


class Editor(browser.Page):
    """The editor, open and empty."""

    PATH = "/edit"

    def text(self):
        return self.page.locator("#code").input_value()

    def button(self, name):
        return self.page.get_by_role("button", name=name, exact=True)

    def write(self, text, start, end=None):
        """Types a text and selects a part of it, or puts the cursor there."""
        self.page.locator("#code").fill(text)
        self.page.locator("#code").evaluate(
            "(field, [start, end]) => { field.focus(); field.setSelectionRange(start, end); }", [start, end or start]
        )

    def edit(self, instruction):
        """Says what to do, clicks, and waits for what came of it."""
        self.page.locator("#instruction").fill(instruction)
        self.button("Edit").click()
        expect(self.button("Accept")).to_be_visible()

    def edited_months(self):
        self.write(SOME, GAP)
        self.edit("Name the months.")


class Edits(Editor):
    def test_a_gap_is_drafted_in_its_place_compared_accepted_undone_and_done_again(self):
        self.hot()
        self.page.evaluate(WATCH_DRAFTS)
        with self.page.expect_request("**/edit") as asked:
            self.edited_months()
        body = asked.value.post_data_json
        self.assertEqual((body["code"], body["selection"]), (SOME, {"start": GAP, "end": GAP}))
        seen = self.page.evaluate("window.seen")
        self.assertGreater(seen["tokens"], 0, "tokens of a draft were on the paper")
        self.assertTrue(seen["shades"], "tinted by their entropy")
        self.assertEqual(set(seen["around"]), {f"{SOME[:GAP]}|{SOME[GAP:]}"}, "and what is around them stayed")
        # Nothing is changed before it is accepted.
        self.assertEqual(self.text(), SOME)
        diff = self.page.locator("#diff")
        expect(diff.locator("del .line")).to_have_text(SOME)
        expect(diff.locator("ins .line")).to_have_text(MONTHS)
        expect(diff.locator("ins b")).to_contain_text("April, May, June, July")
        facts = self.page.locator("#facts").inner_text().lower()
        for name in ("steps", "tokens", "tok/s", "seed"):
            self.assertIn(name, facts)
        # Its drafts can be seen again, in their place.
        scrubber = self.page.get_by_label("Replay of the draft")
        scrubber.press("Home")
        expect(self.page.locator("#draft .token").first).to_be_visible()
        expect(diff).to_be_hidden()
        scrubber.press("End")
        expect(diff).to_be_visible()
        self.button("Accept").click()
        expect(self.page.locator("#code")).to_be_visible()
        self.assertEqual(self.text(), MONTHS)
        expect(self.page.locator("#place")).to_contain_text("24 characters selected")
        self.button("Undo").click()
        self.assertEqual(self.text(), SOME)
        self.button("Redo").click()
        self.assertEqual(self.text(), MONTHS)
        expect(self.button("Redo")).to_be_disabled()

    def test_discarding_leaves_the_text_and_another_gives_another(self):
        self.edited_months()
        seed = lambda: self.page.locator("#facts div").filter(has_text="seed").locator("dd").inner_text()
        first = seed()
        self.button("Another").click()
        expect(self.button("Accept")).to_be_visible()
        self.assertNotEqual(seed(), first)
        self.button("Discard").click()
        expect(self.page.locator("#code")).to_be_visible()
        self.assertEqual(self.text(), SOME)

    def test_the_selection_is_counted_in_code_points_and_replaced(self):
        code = "\U0001f600 Snow is black."
        # The field counts UTF-16 units, of which the face has two.
        start = 1 + len("\U0001f600 Snow is ")
        self.write(code, start, start + len("black"))
        with self.page.expect_request("**/edit") as asked:
            self.edit("Which color is snow?")
        points = asked.value.post_data_json["selection"]
        self.assertEqual(code[points["start"]:points["end"]], "black")
        self.button("Accept").click()
        text = self.text()
        self.assertTrue(text.startswith("\U0001f600 Snow is ") and text.endswith("."), text)
        self.assertNotIn("black", text)

    def test_a_whole_text_is_written_anew(self):
        self.write("one\ntwo\n", 0)
        self.page.get_by_label("Whole text").check()
        expect(self.page.locator("#place")).to_contain_text("whole text")
        self.page.locator("#language").fill("text")
        with self.page.expect_request("**/edit") as asked:
            self.edit("Count to ten.")
        body = asked.value.post_data_json
        self.assertEqual((body["mode"], body["language"], "selection" in body), ("whole", "text", False))

    def test_markup_stays_text_wherever_it_stands(self):
        def answer(route):
            draft = {"canvas": 0, "step": 1, "tokens": [MARKUP], "entropy": [1.0]}
            done = {"document": 3 * MARKUP, "start": len(MARKUP), "end": 2 * len(MARKUP), "text": MARKUP, "seed": 1,
                    "finish_reason": "stop", "usage": {"completion_tokens": 1}, "stats": {}}
            events = [("draft", draft), ("commit", {"text": MARKUP, "tokens": 1}), ("done", done)]
            route.fulfill(
                content_type="text/event-stream",
                body="".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events),
            )

        self.page.route("**/edit", answer)
        self.write(2 * MARKUP, len(MARKUP))
        self.edit(MARKUP)
        self.assertEqual(self.page.locator("#diff del .line").inner_text(), 2 * MARKUP)
        self.assertEqual(self.page.locator("#diff ins .line").inner_text(), 3 * MARKUP)
        self.button("Accept").click()
        self.assertEqual(self.text(), 3 * MARKUP)
        self.assertEqual(self.page.locator("#paper script, #paper img").count(), 0)
        self.assertIsNone(self.page.evaluate("window.owned ?? null"))

    def test_stop_ends_the_request_and_changes_nothing(self):
        # Somebody else has the slot for as long as they listen, so the edit waits for it.
        busy, free = threading.Event(), threading.Event()
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True, "max_tokens": 1900,
                "temperature": 2}
        request = urllib.request.Request(f"{daemon.url}/chat", json.dumps(body | {"stream": None}).encode(),
                                         {"Content-Type": "application/json"})

        def hold():
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.readline()
                busy.set()
                free.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        self.addCleanup(holder.join)
        self.addCleanup(free.set)
        self.assertTrue(busy.wait(60))
        cancelled = daemon.figure('axe_requests_total{outcome="cancelled"}')
        self.write(SOME, GAP)
        self.page.locator("#instruction").fill("Name the months.")
        self.button("Edit").click()
        expect(self.page.locator("#state")).to_have_attribute("data-state", "busy")
        expect(self.page.locator("#draft")).to_be_visible()
        end = time.monotonic() + PATIENCE / 1000
        while daemon.figure("axe_queue_depth") < 1 and daemon.figure("axe_running") < 1 and time.monotonic() < end:
            time.sleep(0.02)
        self.button("Stop").click()
        expect(self.page.locator("#code")).to_be_visible()
        expect(self.page.locator("#review")).to_be_hidden()
        self.assertEqual(self.text(), SOME)
        while daemon.figure('axe_requests_total{outcome="cancelled"}') == cancelled and time.monotonic() < end:
            time.sleep(0.02)
        self.assertGreater(daemon.figure('axe_requests_total{outcome="cancelled"}'), cancelled)
        free.set()
        holder.join()
        self.edit("Name the months.")

    def test_what_is_refused_is_told(self):
        self.write(SOME, GAP)
        self.page.locator("#language").fill("c plus plus")
        self.page.locator("#instruction").fill("Name the months.")
        self.button("Edit").click()
        expect(self.page.get_by_role("alert")).to_contain_text("language")
        # The browser itself notes that the request was refused.
        self.assertTrue(self.complaints and all("400" in told for told in self.complaints), self.complaints)
        self.complaints.clear()
        self.assertEqual(self.text(), SOME)
        self.page.locator("#language").fill("")
        self.edit("Name the months.")
        expect(self.page.get_by_role("alert")).to_be_hidden()

    def test_a_sample_is_edited_with_one_more_click(self):
        self.button("Missing months").click()
        expect(self.page.locator("#welcome")).to_be_hidden()
        self.button("Edit").click()
        self.button("Accept").click()
        self.assertEqual(self.text(), MONTHS)

    def test_the_text_survives_a_reload_and_the_pages_lead_to_each_other(self):
        self.write(SOME, GAP)
        self.open()
        self.assertEqual(self.text(), SOME)
        self.page.get_by_role("link", name="Chat").click()
        expect(self.page.locator("#prompt")).to_be_visible()
        self.page.get_by_role("link", name="Edit").click()
        expect(self.page.locator("#state")).to_have_attribute("data-state", "ready")
        self.assertEqual(self.text(), SOME)


class Keyboard(Editor):
    def test_everything_is_done_without_a_mouse(self):
        self.page.locator("#code").focus()
        self.page.keyboard.type(SOME)
        self.page.keyboard.press("Control+Home")
        for _ in range(GAP):
            self.page.keyboard.press("ArrowRight")
        reached = []
        while self.page.evaluate("document.activeElement.id") != "instruction":
            self.page.keyboard.press("Tab")
            reached.append(self.page.evaluate("document.activeElement.id || document.activeElement.value"))
            self.assertLess(len(reached), 12, reached)
        self.page.keyboard.type("Name the months.")
        self.page.keyboard.press("Control+Enter")
        expect(self.button("Accept")).to_be_focused()
        self.page.keyboard.press("Escape")
        self.assertEqual(self.text(), SOME)
        self.page.keyboard.press("Control+Enter")
        expect(self.button("Accept")).to_be_focused()
        self.page.keyboard.press("Enter")
        self.assertEqual(self.text(), MONTHS)
        self.page.locator("#code").focus()
        self.page.keyboard.press("Control+z")
        self.assertEqual(self.text(), SOME)
        self.page.keyboard.press("Control+Shift+z")
        self.assertEqual(self.text(), MONTHS)
        # What was typed is undone, too, and typing on ends what could be done again.
        self.page.keyboard.press("Control+End")
        self.page.keyboard.type(" Then?")
        self.page.keyboard.press("Control+z")
        self.assertEqual(self.text(), MONTHS)
        self.page.keyboard.type("!")
        expect(self.button("Redo")).to_be_disabled()


class Long:
    """A text that is longer than its window: text, numbers and marks scroll together, and all of it can be reached."""

    LINES = [f"line {number} of a long text" for number in range(1, 301)]

    def where(self, line):
        """A line's middle, the paper's edges, and how far the field is scrolled and could be by itself."""
        return self.page.evaluate("""(line) => {
            const paper = document.getElementById("paper").getBoundingClientRect();
            const { top, height } = document.getElementById("backdrop").children[line - 1].getBoundingClientRect();
            const field = document.getElementById("code");
            return { middle: top + height / 2, from: paper.top, to: paper.bottom, own: field.scrollTop, hidden: field.scrollHeight - field.clientHeight };
        }""", line)

    def seen(self, line):
        place = self.where(line)
        self.assertEqual((place["own"], place["hidden"]), (0, 0), "the field shows all of its text")
        return place["from"] <= place["middle"] < place["to"]

    def until(self, seen):
        end = time.monotonic() + PATIENCE / 1000
        while not seen():
            self.assertLess(time.monotonic(), end, "it never was in sight")
            time.sleep(0.02)

    def paste(self):
        """Puts the text there as people do, by keys."""
        self.page.locator("#code").focus()
        self.page.keyboard.insert_text("\n".join(self.LINES))
        expect(self.page.locator("#backdrop > div")).to_have_count(len(self.LINES))

    def test_what_is_pasted_and_typed_stays_in_sight(self):
        self.paste()
        self.assertTrue(self.seen(300), "the cursor is behind what was pasted")
        self.page.keyboard.press("Control+Home")
        self.until(lambda: self.seen(1))
        self.page.keyboard.press("Control+End")
        for _ in range(40):
            self.page.keyboard.press("Enter")
        self.assertTrue(self.seen(340))

    def test_the_wheel_moves_all_of_it(self):
        self.paste()
        self.page.locator("#paper").hover()
        self.page.mouse.wheel(0, -20000)
        self.until(lambda: self.seen(1))
        self.page.mouse.wheel(0, 1000)
        self.until(lambda: not self.seen(1) and self.seen(50))
        self.page.mouse.wheel(0, 20000)
        self.until(lambda: self.seen(300))

    def test_a_selection_is_marked_where_it_is_and_an_accepted_edit_is_in_sight(self):
        self.paste()
        start = sum(len(line) + 1 for line in self.LINES[:250])
        self.page.locator("#code").evaluate("(field, at) => field.setSelectionRange(at, at + 4)", start)
        self.page.locator("#instruction").focus()
        mark = self.page.locator("#backdrop mark")
        expect(mark).to_have_text("line")
        self.assertEqual(mark.evaluate("(mark) => [...mark.parentNode.parentNode.children].indexOf(mark.parentNode)"), 250)
        done = {"document": "\n".join(self.LINES).replace("line 251 of", "row 251 of"), "start": start, "end": start + 3, "text": "row",
                "seed": 1, "finish_reason": "stop", "usage": {"completion_tokens": 1}, "stats": {}}
        self.page.route("**/edit", lambda route: route.fulfill(
            content_type="text/event-stream", body=f"event: done\ndata: {json.dumps(done)}\n\n",
        ))
        self.edit("Call it a row.")
        self.button("Accept").click()
        expect(self.page.locator("#code")).to_be_visible()
        self.assertTrue(self.seen(251))
        expect(mark).to_have_text("row")


    def test_what_is_replayed_is_in_sight(self):
        self.paste()
        start = sum(len(line) + 1 for line in self.LINES[:250])
        self.page.locator("#code").evaluate("(field, at) => field.setSelectionRange(at, at + 4)", start)
        self.page.locator("#instruction").focus()
        done = {"document": "\n".join(self.LINES).replace("line 251 of", "row 251 of"), "start": start, "end": start + 3, "text": "row",
                "seed": 1, "finish_reason": "stop", "usage": {"completion_tokens": 1}, "stats": {}}
        drafts = [{"canvas": 0, "step": step, "tokens": [text], "entropy": [1]} for step, text in ((1, "raw"), (2, "row"))]
        events = [("draft", draft) for draft in drafts] + [("commit", {"text": "row"}), ("done", done)]
        self.page.route("**/edit", lambda route: route.fulfill(
            content_type="text/event-stream", body="".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events),
        ))
        self.edit("Call it a row.")
        self.page.get_by_label("Replay of the draft").press("Home")
        gap = self.page.locator("#draft .gap")
        expect(gap).to_have_text("raw")
        expect(gap).to_be_in_viewport()


class LongOnADesk(Long, Editor):
    pass


class LongOnAPhone(Long, Editor):
    VIEW = {"viewport": {"width": 390, "height": 750}}


class Phone(Editor):
    VIEW = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}

    def test_it_fits_and_is_used_by_taps(self):
        self.button("Missing months").tap()
        self.button("Edit").tap()
        expect(self.button("Accept")).to_be_visible()
        wide = lambda: self.page.evaluate("document.documentElement.scrollWidth")
        self.assertLessEqual(wide(), 360, "nothing sticks out to the side")
        self.button("Accept").tap()
        self.assertEqual(self.text(), MONTHS)
        self.assertLessEqual(wide(), 360)
        expect(self.page.locator("#settings")).to_be_hidden()
        self.button("Settings").tap()
        expect(self.page.get_by_label("Temperature")).to_be_visible()


class Accessible:
    """axe-core finds nothing serious, before, while and after something is edited."""

    def test_axe_core_finds_nothing_serious(self):
        self.axe_core()
        self.check("empty")
        self.write(f"one\n{SOME}\ntwo\n", 4 + GAP)
        self.check("typed")
        self.hot()
        # The edit does not end while it is looked at.
        self.page.route("**/edit", lambda route: route.fulfill(
            content_type="text/event-stream",
            body='event: draft\ndata: {"canvas": 0, "step": 1, "tokens": [" April", ",", null], "entropy": [0.5, 3, 0]}\n\n'
                 'event: error\ndata: {"error": {"message": "a test broke it off"}}\n\n',
        ))
        self.page.locator("#instruction").fill("Name the months.")
        self.button("Edit").click()
        expect(self.page.get_by_role("alert")).to_be_visible()
        self.check("failed")
        self.page.unroute("**/edit")
        held = []
        self.page.route("**/edit", lambda route: held.append(route))
        self.button("Edit").click()
        expect(self.page.locator("#draft")).to_be_visible()
        self.check("drafting")
        held[0].continue_()
        expect(self.button("Accept")).to_be_visible()
        self.check("compared")
        self.page.get_by_label("Replay of the draft").press("Home")
        self.check("replayed")
        self.button("Accept").click()
        self.check("accepted")


class AccessibleLight(Accessible, Editor):
    VIEW = Editor.VIEW | {"color_scheme": "light"}


class AccessibleDark(Accessible, Editor):
    VIEW = Editor.VIEW | {"color_scheme": "dark"}


class AccessiblePhone(Accessible, Editor):
    VIEW = Phone.VIEW | {"color_scheme": "dark"}


if __name__ == "__main__":
    unittest.main()
