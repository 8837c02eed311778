"""Anthropic's own Python client: texts, streams, thoughts and tools."""

import asyncio
import unittest

import anthropic
from support import CAPITALS, PATIENCE, cancelled, capital, eventually, idle, miniature, smollm2, start, user

WEATHER = {
    "name": "get_weather", "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client(daemon, kind=anthropic.Anthropic, **more):
    settings = {"base_url": daemon.url, "api_key": "none", "max_retries": 0, "timeout": PATIENCE} | more
    return kind(**settings)


class Messages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = client(miniature())

    def ask(self, text=capital("Australia"), **more):
        more = {"model": "tiny-diffusion", "max_tokens": 200, "messages": user(text), "extra_body": {"seed": 1}} | more
        return self.client.messages.create(**more)

    def test_a_message_has_everything_the_type_promises(self):
        message = self.ask(system="Be brief.")
        self.assertEqual((message.type, message.role, message.model), ("message", "assistant", "tiny-diffusion"))
        self.assertTrue(message.id.startswith("msg_"))
        [block] = message.content
        self.assertEqual((block.type, block.text), ("text", "The capital of Australia is Canberra."))
        self.assertEqual((message.stop_reason, message.stop_sequence), ("end_turn", None))
        self.assertGreater(message.usage.input_tokens + message.usage.cache_read_input_tokens, 10)
        self.assertGreater(message.usage.output_tokens, 3)

    def test_a_stream_ends_with_the_same_message(self):
        months = "List the months of the year."
        whole = self.ask(months)
        with self.client.messages.stream(
                model="tiny-diffusion", max_tokens=200, messages=user(months), extra_body={"seed": 1}) as stream:
            kinds = []
            for event in stream:
                kinds.append(event.type)
            final = stream.get_final_message()
        self.assertEqual((kinds[0], kinds[-1]), ("message_start", "message_stop"))
        self.assertEqual(final.content[0].text, whole.content[0].text)
        self.assertEqual((final.stop_reason, final.usage.output_tokens), ("end_turn", whole.usage.output_tokens))

    def test_limits_and_stop_sequences_are_told_apart(self):
        months = "List the months of the year."
        stopped = self.ask(months, stop_sequences=["April"])
        self.assertEqual((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", "April"))
        self.assertEqual(stopped.content[0].text, "January, February, March, ")
        cut = self.ask(months, max_tokens=3)
        self.assertEqual((cut.stop_reason, cut.usage.output_tokens), ("max_tokens", 3))

    def test_thinking_is_a_block_of_its_own(self):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = self.ask("What is 3 + 4?", max_tokens=2000, thinking=thinking)
        self.assertEqual([block.type for block in message.content], ["thinking", "text"])
        self.assertTrue(message.content[0].thinking)
        self.assertEqual(message.content[1].text, "3 + 4 = 7")
        with self.client.messages.stream(
                model="tiny-diffusion", max_tokens=2000, messages=user("What is 3 + 4?"), thinking=thinking,
                extra_body={"seed": 1}) as stream:
            final = stream.get_final_message()
        self.assertEqual([block.model_dump() for block in final.content], [block.model_dump() for block in message.content])
        again = user("What is 3 + 4?") + [{"role": "assistant", "content": message.content}] + user(capital("Italy"))
        self.assertEqual(self.ask(messages=again).content[0].text, "The capital of Italy is Rome.")

    def test_the_conversation_goes_on(self):
        messages = user(capital("France")) + [{"role": "assistant", "content": "The capital of France is Paris."}]
        self.assertEqual(self.ask(messages=messages + user(capital("Spain"))).content[0].text, "The capital of Spain is Madrid.")

    def test_tokens_are_counted(self):
        counted = self.client.messages.count_tokens(model="tiny-diffusion", messages=user(capital("Egypt")))
        usage = self.ask(capital("Egypt")).usage
        self.assertEqual(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)

    def test_errors_have_their_types(self):
        for more, kind in (({"max_tokens": 0}, anthropic.BadRequestError), ({"model": "claude"}, anthropic.NotFoundError),
                           ({"messages": []}, anthropic.BadRequestError)):
            for stream in (False, True):
                with self.subTest(more=more, stream=stream), self.assertRaises(kind) as caught:
                    self.ask(**more, stream=stream)
                self.assertEqual(caught.exception.body["type"], "error")
                self.assertTrue(caught.exception.body["error"]["message"])

    def test_keys(self):
        daemon = start("anthropic-keys", AXE_API_KEY="right", AXE_MODEL_SERVED_NAME="tiny-diffusion")
        self.addCleanup(daemon.stop)
        words = {"model": "tiny-diffusion", "max_tokens": 5, "messages": user("hi")}
        with self.assertRaises(anthropic.AuthenticationError):
            client(daemon, api_key="wrong").messages.create(**words)
        self.assertTrue(client(daemon, api_key="right").messages.create(**words).content)


class Tools(unittest.TestCase):
    def test_a_call_that_is_forced_and_its_result(self):
        asked = client(smollm2())
        question = user("What is the weather in Paris?")
        words = {"model": "smollm2", "max_tokens": 100, "tools": [WEATHER], "extra_body": {"seed": 1}}
        message = asked.messages.create(**words, messages=question, tool_choice={"type": "tool", "name": "get_weather"})
        call = message.content[-1]
        self.assertEqual((message.stop_reason, call.type, call.name), ("tool_use", "tool_use", "get_weather"))
        self.assertIsInstance(call.input, dict)
        with asked.messages.stream(
                **words, messages=question, tool_choice={"type": "tool", "name": "get_weather"}) as stream:
            final = stream.get_final_message()
        self.assertEqual((final.stop_reason, final.content[-1].input), ("tool_use", call.input))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny, 21 degrees."}]}
        messages = question + [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        told = asked.messages.create(**words, messages=messages, tool_choice={"type": "none"})
        self.assertEqual(told.content[0].type, "text")
        self.assertNotEqual(told.stop_reason, "tool_use")


class Slot(unittest.IsolatedAsyncioTestCase):
    async def test_many_at_once(self):
        asked = client(miniature(), anthropic.AsyncAnthropic)
        self.addAsyncCleanup(asked.close)

        async def ask(country):
            message = await asked.messages.create(
                model="tiny-diffusion", max_tokens=100, messages=user(capital(country)), extra_body={"seed": 1})
            return message.content[0].text

        found = await asyncio.gather(*(ask(country) for country in CAPITALS))
        self.assertEqual(found, [f"The capital of {country} is {CAPITALS[country]}." for country in CAPITALS])

    def test_closing_a_stream_frees_the_slot(self):
        daemon = smollm2()
        eventually("the daemon is idle", lambda: idle(daemon))
        before = cancelled(daemon)
        with client(daemon).messages.stream(
                model="smollm2", max_tokens=4000, messages=user("Write a long story."), extra_body={"ignore_eos": True}) as stream:
            for _, _ in zip(range(3), stream.text_stream):
                pass
        eventually("the slot is free", lambda: idle(daemon) and cancelled(daemon) == before + 1)


if __name__ == "__main__":
    unittest.main()
