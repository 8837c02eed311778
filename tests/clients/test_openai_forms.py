"""OpenAI's Python client where replies have a form: tools, schemas, log-probabilities, several choices, and `/v1/responses`."""

import json
import math
import unittest

import openai
import pydantic
from support import cancelled, capital, eventually, idle, miniature, smollm2, user
from test_openai import ENDLESS, client

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.", "strict": True,
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
        },
    },
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = user("What is the weather in Paris?")


class Capital(pydantic.BaseModel):
    country: str
    city: str


class Tools(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = client(smollm2())

    def ask(self, **more):
        words = {"model": "smollm2", "messages": QUESTION, "tools": [WEATHER], "seed": 1, "max_tokens": 100, "temperature": 0}
        return self.client.chat.completions.create(**words | more)

    def test_a_call_that_is_forced_and_its_result(self):
        for choice in ("required", FORCED):
            # Greedy, so small a model would call for ever.
            reply = self.ask(tool_choice=choice, parallel_tool_calls=False)
            message = reply.choices[0].message
            self.assertEqual(reply.choices[0].finish_reason, "tool_calls")
            self.assertEqual((message.tool_calls[0].type, message.tool_calls[0].function.name), ("function", "get_weather"))
            self.assertEqual(list(json.loads(message.tool_calls[0].function.arguments)), ["city"])
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in message.tool_calls]
        told = self.ask(messages=QUESTION + [message] + answers, tool_choice="none")
        self.assertTrue(told.choices[0].message.content)
        self.assertIsNone(told.choices[0].message.tool_calls)

    def test_a_streamed_call_is_the_same(self):
        whole = self.ask(tool_choice=FORCED).choices[0].message.tool_calls
        names, arguments, ids = {}, {}, {}
        for chunk in self.ask(tool_choice=FORCED, stream=True):
            [choice] = chunk.choices
            for call in choice.delta.tool_calls or []:
                if call.id:
                    self.assertNotIn(call.index, ids)
                    ids[call.index], names[call.index] = call.id, call.function.name
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        self.assertEqual(choice.finish_reason, "tool_calls")
        self.assertEqual(list(names.values()), [call.function.name for call in whole])
        self.assertEqual(list(arguments.values()), [call.function.arguments for call in whole])

    def test_a_call_that_is_cut_has_length_for_its_reason(self):
        self.assertEqual(self.ask(tool_choice=FORCED, max_tokens=2).choices[0].finish_reason, "length")

    def test_tools_that_are_not_to_be_called_are_not(self):
        reply = self.ask(tool_choice="none")
        self.assertIsNone(reply.choices[0].message.tool_calls)
        self.assertEqual(reply.usage.prompt_tokens, self.ask(tools=openai.omit).usage.prompt_tokens)

    def test_another_kind_of_tool_is_refused_by_name(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask(tools=[{"type": "custom", "custom": {"name": "x"}}])
        self.assertEqual(caught.exception.param, "tools[0].type")


class Forms(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = client(smollm2())

    def ask(self, **more):
        return self.client.chat.completions.create(
            **{"model": "smollm2", "messages": user(capital("France")), "seed": 1, "max_tokens": 200} | more)

    def test_a_model_of_pydantic_is_filled_in(self):
        for seed in range(1, 4):
            reply = self.client.chat.completions.parse(
                model="smollm2", messages=user(capital("France")), response_format=Capital, seed=seed, max_tokens=200)
            self.assertIsInstance(reply.choices[0].message.parsed, Capital)

    def test_a_stream_is_parsed_too(self):
        with self.client.chat.completions.stream(
                model="smollm2", messages=user(capital("France")), response_format=Capital, seed=1, max_tokens=200) as stream:
            for _ in stream:
                pass
            self.assertIsInstance(stream.get_final_completion().choices[0].message.parsed, Capital)

    def test_a_reply_that_is_cut_is_told_apart(self):
        with self.assertRaises(openai.LengthFinishReasonError):
            self.client.chat.completions.parse(
                model="smollm2", messages=user("hi"), response_format=Capital, seed=1, max_tokens=4)

    def test_any_object(self):
        reply = self.ask(response_format={"type": "json_object"})
        self.assertEqual(reply.choices[0].finish_reason, "stop")
        self.assertIsInstance(json.loads(reply.choices[0].message.content), dict)

    def test_a_model_that_denoises_refuses(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            client(miniature()).chat.completions.parse(model="tiny-diffusion", messages=user("hi"), response_format=Capital)
        self.assertTrue(caught.exception.param.startswith("response_format"))

    def test_log_probabilities_are_those_of_the_text(self):
        reply = self.ask(logprobs=True, top_logprobs=3, max_tokens=20)
        [choice] = reply.choices
        tokens = choice.logprobs.content
        self.assertEqual(b"".join(bytes(token.bytes) for token in tokens).decode(), choice.message.content)
        for token in tokens:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertLessEqual(sum(math.exp(other.logprob) for other in token.top_logprobs), 1 + 1e-5)
            self.assertLessEqual(token.logprob, 1e-6)
        streamed = [
            token for chunk in self.ask(logprobs=True, top_logprobs=3, max_tokens=20, stream=True)
            for choice in chunk.choices for token in (choice.logprobs.content if choice.logprobs else None) or []
        ]
        self.assertEqual(streamed, tokens)

    def test_the_older_log_probabilities(self):
        [choice] = self.client.completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=2).choices
        told = choice.logprobs
        self.assertEqual("".join(told.tokens), choice.text)
        self.assertEqual(len(told.tokens), len(told.token_logprobs))
        self.assertEqual(told.text_offset[0], 0)

    def test_several_choices(self):
        reply = self.ask(n=3, max_tokens=12, temperature=1)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1, 2])
        texts = [choice.message.content for choice in reply.choices]
        self.assertGreater(len(set(texts)), 1)
        streamed = ["", "", ""]
        for chunk in self.ask(n=3, max_tokens=12, temperature=1, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        self.assertEqual(streamed, texts)

    def test_a_bias_rules_a_token_out(self):
        words = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        first = self.client.completions.create(**words).choices[0].text
        token = self.client.post(f"{smollm2().url}/tokenize", body={"content": first}, cast_to=object)["tokens"][0]
        other = self.client.completions.create(**words, logit_bias={str(token): -100}).choices[0].text
        self.assertNotEqual(first, other)


class Responses(unittest.TestCase):
    """OpenAI's newer API."""

    @classmethod
    def setUpClass(cls):
        cls.client = client(miniature())

    def ask(self, text=capital("Australia"), **more):
        return self.client.responses.create(**{"model": "tiny-diffusion", "input": text, "extra_body": {"seed": 1}} | more)

    def test_a_response(self):
        reply = self.ask(instructions="Be brief.")
        self.assertEqual((reply.object, reply.status, reply.model), ("response", "completed", "tiny-diffusion"))
        self.assertEqual(reply.output_text, "The capital of Australia is Canberra.")
        self.assertEqual(reply.usage.total_tokens, reply.usage.input_tokens + reply.usage.output_tokens)

    def test_a_stream_ends_with_the_same_response(self):
        months = "List the months of the year."
        events = list(self.ask(months, stream=True))
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        self.assertEqual((events[0].type, events[-1].type), ("response.created", "response.completed"))
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual(deltas, self.ask(months).output_text)
        self.assertEqual(events[-1].response.output_text, deltas)
        with self.client.responses.stream(model="tiny-diffusion", input=months, extra_body={"seed": 1}) as stream:
            for _ in stream:
                pass
            self.assertEqual(stream.get_final_response().output_text, deltas)

    def test_a_conversation_goes_on_by_its_items(self):
        first = self.ask(capital("France"))
        again = [{"role": "user", "content": capital("France")}, *first.output, {"role": "user", "content": capital("Italy")}]
        self.assertEqual(self.ask(again).output_text, "The capital of Italy is Rome.")

    def test_thoughts_are_an_item(self):
        reply = self.ask("What is 3 + 4?", reasoning={"effort": "high"})
        self.assertEqual([item.type for item in reply.output], ["reasoning", "message"])
        self.assertEqual(reply.output_text, "3 + 4 = 7")
        self.assertGreater(reply.usage.output_tokens_details.reasoning_tokens, 0)

    def test_a_cut_response_says_so(self):
        reply = self.ask("List the months of the year.", max_output_tokens=3)
        self.assertEqual((reply.status, reply.incomplete_details.reason), ("incomplete", "max_output_tokens"))

    def test_what_is_kept_nowhere_is_refused(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask(previous_response_id="resp_1")
        self.assertEqual(caught.exception.param, "previous_response_id")

    def test_tools_and_forms(self):
        tool = {"type": "function"} | WEATHER["function"]
        asked = client(smollm2()).responses
        words = {"model": "smollm2", "max_output_tokens": 200, "extra_body": {"seed": 1}}
        reply = asked.create(**words, input=QUESTION, tools=[tool], tool_choice={"type": "function", "name": "get_weather"})
        call = next(item for item in reply.output if item.type == "function_call")
        self.assertIsInstance(json.loads(call.arguments), dict)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        told = asked.create(**words, input=[*QUESTION, *reply.output, result], tools=[tool], tool_choice="none")
        self.assertTrue(told.output_text)
        parsed = asked.parse(**words, input=capital("France"), text_format=Capital)
        self.assertIsInstance(parsed.output_parsed, Capital)

    def test_closing_a_stream_frees_the_slot(self):
        daemon = smollm2()
        eventually("the daemon is idle", lambda: idle(daemon))
        before = cancelled(daemon)
        stream = client(daemon).responses.create(
            model="smollm2", input="Write a long story.", stream=True, extra_body=ENDLESS["extra_body"])
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        eventually("the slot is free", lambda: idle(daemon) and cancelled(daemon) == before + 1)


if __name__ == "__main__":
    unittest.main()
