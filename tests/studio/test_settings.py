"""What the studio makes of settings, of another model, and of a server that says no or nothing.

Run with the tests of the chat page by `scripts/test.sh studio`; see test_studio.py.
"""

import pathlib
import sys
import unittest

from playwright.sync_api import expect

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import browser  # noqa: E402 (the path comes first)

#: Another model in place of the one that denoises.
CAUSAL = {
    "id": "local", "name": "another", "kind": "causal", "chat": True, "thinking": False,
    "defaults": {"max_tokens": 5, "temperature": 0.5}, "about": "another model: tokens one after the other",
}

STREAM = 'event: commit\ndata: {"text": "Yes.", "reasoning": "", "tokens": 1}\n\nevent: done\ndata: {"document": "Yes.", "start": 0, ' \
    '"end": 4, "text": "Yes.", "finish_reason": "stop", "usage": {"completion_tokens": 1}, "seed": 1, "stats": {"passes": 1, ' \
    '"first_token_s": 0.5, "elapsed_s": 1}}\n\n'


def setUpModule():
    browser.begin()


def told(page):
    """Everything that the page says."""
    return page.locator("body").inner_text()


class Settings:
    """Both pages refuse what means nothing, take up another model, and say in a reader's words what is wrong."""

    def test_what_means_nothing_is_marked_and_not_sent(self):
        asked = []
        self.page.on("request", lambda request: asked.append(request) if request.method == "POST" else None)
        for label, texts in (("Seed", ("abc", "1.5", "1e3", "12345678901234567")), ("Most tokens", ("-3", "0", "1.5"))):
            field = self.page.get_by_label(label, exact=True)
            for text in texts:
                field.fill(text)
                expect(field).to_have_attribute("aria-invalid", "true")
                self.send("hello")
                expect(self.page.locator(".toast")).to_contain_text(label)
                expect(field).to_be_focused()
            field.fill("")
            expect(field).to_have_attribute("aria-invalid", "false")
        self.assertEqual(asked, [])

    def test_what_the_api_takes_is_sent(self):
        self.page.get_by_label("Seed", exact=True).fill("-5")
        self.page.get_by_label("Most tokens").fill("")
        usual = int(self.page.get_by_label("Most tokens").get_attribute("placeholder"))
        with self.page.expect_request(lambda request: request.method == "POST") as asked:
            self.send("hello")
        body = asked.value.post_data_json
        self.assertEqual((body["seed"], body["max_tokens"]), (-5, usual))
        # Told as it was asked for, although the server's number is one of 64 bits without a sign.
        expect(self.page.locator("dd").get_by_text("-5", exact=True).first).to_be_visible()
        self.assertEqual(asked.value.response().status, 200)

    def test_a_question_to_a_model_that_was_exchanged_is_put_to_the_new_one(self):
        bodies = []

        def answer(route):
            if route.request.method != "POST":
                return route.continue_()
            bodies.append(route.request.post_data_json)
            if "steps" in bodies[-1]:
                refusal = {"error": {"message": "`steps`: this model does not denoise", "code": "unsupported_parameter"}}
                return route.fulfill(status=400, json=refusal)
            route.fulfill(content_type="text/event-stream", body=STREAM)

        self.page.route("**/studio/backends", lambda route: route.fulfill(json={"backends": [CAUSAL]}))
        self.page.route("**" + ("/edit" if self.PATH == "/edit" else "/chat"), answer)
        self.send("hello")
        expect(self.page.locator("main")).to_contain_text("Yes.")
        expect(self.page.locator("#about")).to_have_text(CAUSAL["about"])
        expect(self.page.get_by_role("alert")).to_be_hidden()
        self.assertEqual(["steps" in body for body in bodies], [True, False])
        # The browser notes the refusal.
        self.assertTrue(all("400" in complaint for complaint in self.complaints), self.complaints)
        self.complaints.clear()

    def test_a_refusal_that_has_another_reason_is_told_once(self):
        asked = []
        route = "**" + ("/edit" if self.PATH == "/edit" else "/chat")

        def refuse(route):
            asked.append(route)
            route.fulfill(status=400, json={"error": {"message": "no, says the server"}})

        self.page.route(route, refuse)
        self.send("hello")
        expect(self.page.get_by_role("alert")).to_have_text("no, says the server")
        self.assertEqual(len(asked), 1)
        self.complaints.clear()

    def test_what_is_wrong_is_said_in_a_readers_words(self):
        route = "**" + ("/edit" if self.PATH == "/edit" else "/chat")
        refusal = {"error": {"message": "an API key is needed: send it as `Authorization: Bearer <key>`"}}
        self.page.route(route, lambda route: route.fulfill(status=401, json=refusal))
        self.send("hello")
        expect(self.page.get_by_role("alert")).to_contain_text("asks for an API key")
        self.page.get_by_label("API key").fill("wrong")
        self.send("hello")
        expect(self.page.get_by_role("alert").last).to_contain_text("does not take this API key")
        self.page.unroute(route)
        self.page.route(route, lambda route: route.abort("connectionrefused"))
        self.send("hello")
        expect(self.page.get_by_role("alert").last).to_contain_text("cannot be reached")
        for words in ("Bearer", "Failed to fetch", "network error"):
            self.assertNotIn(words, told(self.page))
        self.complaints.clear()

    def test_a_missing_key_is_asked_for_before_anything_is_promised(self):
        refusal = {"error": {"message": "an API key is needed: send it as `Authorization: Bearer <key>`"}}
        self.page.route("**/studio/backends", lambda route: route.fulfill(status=401, json=refusal))
        self.page.goto(browser.daemon.url + self.PATH)
        expect(self.page.locator("#state")).to_have_text("an API key is needed")
        self.send("hello")
        expect(self.page.locator("body")).to_contain_text("Not yet: an API key is needed.")
        for words in ("Bearer", "noise", "what models there are"):
            self.assertNotIn(words, told(self.page))
        self.complaints.clear()


class OfTheChat(Settings, browser.Chat):
    def send(self, text):
        self.page.locator("#prompt").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def test_the_first_text_of_a_model_without_drafts_is_called_so(self):
        self.page.route("**/chat", lambda route: route.fulfill(content_type="text/event-stream", body=STREAM))
        self.send("hello")
        facts = self.finished(0).locator(".facts")
        expect(facts).to_contain_text("first text")
        expect(facts).not_to_contain_text("first draft")
        self.page.unroute("**/chat")
        self.page.get_by_label("Model to talk to").select_option("remote")
        facts = self.ask("What is the capital of France?").locator(".facts")
        expect(facts).to_contain_text("first text")
        expect(facts).not_to_contain_text("first draft")

    def test_ticks_have_the_pages_colour(self):
        colour = lambda id: self.page.locator(id).evaluate("(node) => getComputedStyle(node).accentColor")
        self.assertNotEqual(colour("#thinking"), "auto")
        self.assertEqual(colour("#thinking"), colour("#temperature"))


class OfTheEditor(Settings, browser.Page):
    PATH = "/edit"

    def test_the_panel_names_the_model_that_has_made_the_edit(self):
        self.page.route("**/edit", lambda route: route.fulfill(content_type="text/event-stream", body=STREAM))
        self.send("Name the colour.")
        expect(self.page.get_by_role("button", name="Accept")).to_be_visible()
        self.page.get_by_role("button", name="Discard").click()
        # Only the edit itself is to bring news.
        self.page.evaluate("for (let timer = 0; timer < 100; timer += 1) clearInterval(timer)")
        self.page.route("**/ready", lambda route: route.fulfill(json={"status": "ready", "model": "another"}))
        self.page.route("**/studio/backends", lambda route: route.fulfill(json={"backends": [CAUSAL]}))
        self.send("Name the colour.")
        expect(self.page.get_by_role("button", name="Accept")).to_be_visible()
        expect(self.page.locator("#about")).to_have_text(CAUSAL["about"])

    def send(self, text):
        if self.page.locator("#code").input_value() == "":
            self.page.locator("#code").fill("Snow is .")
        self.page.locator("#instruction").fill(text)
        self.page.get_by_role("button", name="Edit", exact=True).click()


if __name__ == "__main__":
    unittest.main()
