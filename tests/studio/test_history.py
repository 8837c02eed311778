"""What the studio keeps of chats in the browser: with several tabs, and when a page is left while an answer is written.

Run with the tests of the chat page by `scripts/test.sh studio`; see test_studio.py.
"""

import pathlib
import sys
import unittest

from playwright.sync_api import expect

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import browser  # noqa: E402 (the path comes first)


def setUpModule():
    browser.begin()


class Kept(browser.Chat):
    def questions(self):
        return [question.inner_text() for question in self.page.locator(".message.user").all()]

    def in_tab(self, page):
        """The page that what follows is about."""
        self.page = page
        return page

    def test_tabs_with_the_same_chat_keep_each_others_turns(self):
        first = self.page
        self.ask("What is the capital of France?")
        second = self.in_tab(self.context.new_page())
        self.open()
        self.assertEqual(self.questions(), ["What is the capital of France?"])
        self.ask("What is the capital of Italy?")
        self.in_tab(first)
        with first.expect_request("**/chat") as asked:
            self.page.locator("#prompt").fill("What is the capital of Spain?")
            self.page.get_by_role("button", name="Send").click()
        self.finished(2)
        # The model is told the whole conversation, the page shows it, and so does the next page.
        told = [message["content"] for message in asked.value.post_data_json["messages"] if message["role"] == "user"]
        whole = [f"What is the capital of {country}?" for country in ("France", "Italy", "Spain")]
        self.assertEqual((told, self.questions()), (whole, whole))
        self.in_tab(second)
        self.ask("What is the capital of Japan?")
        self.in_tab(self.context.new_page())
        self.open()
        self.assertEqual(self.questions(), [*whole, "What is the capital of Japan?"])
        self.assertEqual([self.told(answer) != "" for answer in self.answers().all()], 4 * [True])

    def write(self):
        """Asks for an answer that goes on, and waits for its first canvas; returns what there is of it."""
        self.long_answer()
        before = self.answers().count()
        self.page.locator("#prompt").fill("Write three lines about rain.")
        self.page.get_by_role("button", name="Send").click()
        settled = self.answers().nth(before).locator(".settled")
        expect(settled).not_to_have_text("")
        return settled.inner_text()

    def left(self, text):
        """What is found when the page is open again."""
        self.page.unroute("**/chat")
        self.assertEqual(self.questions()[-1], "Write three lines about rain.")
        answer = self.answers().last
        self.assertTrue(self.told(answer).startswith(text), (self.told(answer), text))
        expect(answer).to_contain_text("Not whole")
        answer.get_by_label("Replay of the draft").press("Home")
        self.assertGreater(answer.locator(".token").count(), 0)
        # The browser may note that the stream broke off.
        self.complaints.clear()

    def test_a_page_that_is_loaded_anew_while_it_writes_keeps_question_and_answer(self):
        self.ask("What is the capital of France?")
        text = self.write()
        self.open()
        self.assertEqual(len(self.questions()), 2)
        self.left(text)
        # The conversation goes on from there.
        self.page.get_by_label("Temperature").press("Home")
        with self.page.expect_request("**/chat") as asked:
            self.ask("What is the capital of Italy?")
        roles = [message["role"] for message in asked.value.post_data_json["messages"]]
        self.assertEqual(roles, 2 * ["user", "assistant"] + ["user"])
        self.open()
        self.assertEqual(len(self.questions()), 3)

    def test_a_new_chat_whose_page_is_left_for_the_other_one_is_kept(self):
        text = self.write()
        self.page.get_by_role("link", name="Edit").click()
        expect(self.page.locator("#code")).to_be_visible()
        self.open()
        expect(self.page.locator("#chat-list button").first).to_have_text("Write three lines about rain.")
        self.left(text)

    def test_a_tab_that_is_closed_leaves_its_question(self):
        text = self.write()
        self.page.close(run_before_unload=True)
        self.in_tab(self.context.new_page())
        self.open()
        self.left(text)

    def test_a_question_without_an_answer_is_not_told_again(self):
        self.page.route("**/chat", lambda route: None)
        self.page.locator("#prompt").fill("Nobody answers this.")
        self.page.get_by_role("button", name="Send").click()
        expect(self.page.locator("#state")).to_have_attribute("data-state", "busy")
        expect(self.answers()).to_have_count(1)
        self.open()
        self.assertEqual(self.questions(), ["Nobody answers this."])
        self.page.unroute("**/chat")
        with self.page.expect_request("**/chat") as asked:
            self.ask("What is the capital of Italy?")
        self.assertEqual(len(asked.value.post_data_json["messages"]), 1)


if __name__ == "__main__":
    unittest.main()
