"""OpenAI's own Python client: what a program that was written for OpenAI sees here.

Run by `scripts/test.sh clients`, which brings the clients; by hand, with them in the Python in use:

    python3 -m unittest discover -s tests/clients
"""

import asyncio
import time
import unittest

import openai
from support import CAPITALS, PATIENCE, cancelled, capital, eventually, idle, miniature, operator, smollm2, start, user

#: Makes a reply go on for many seconds.
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def connection(daemon, more):
    return {"base_url": f"{daemon.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE} | more


def client(daemon, **more):
    return openai.OpenAI(**connection(daemon, more))


def async_client(daemon, **more):
    return openai.AsyncOpenAI(**connection(daemon, more))


class Chat(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = miniature()
        cls.client = client(cls.daemon)

    def ask(self, text=capital("Australia"), **more):
        return self.client.chat.completions.create(model="tiny-diffusion", messages=user(text), seed=1, **more)

    def test_a_reply_has_everything_the_type_promises(self):
        reply = self.ask()
        self.assertEqual(reply.object, "chat.completion")
        self.assertTrue(reply.id.startswith("chatcmpl-"))
        self.assertEqual(reply._request_id.removeprefix("req-"), reply.id.removeprefix("chatcmpl-"))
        self.assertEqual(reply.model, "tiny-diffusion")
        self.assertAlmostEqual(reply.created, time.time(), delta=PATIENCE)
        self.assertTrue(reply.system_fingerprint.startswith("fp_"))
        [choice] = reply.choices
        self.assertEqual((choice.index, choice.finish_reason), (0, "stop"))
        self.assertEqual((choice.message.role, choice.message.content), ("assistant", "The capital of Australia is Canberra."))
        self.assertIsNone(choice.message.refusal)
        self.assertIsNone(choice.message.tool_calls)
        usage = reply.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreaterEqual(usage.prompt_tokens_details.cached_tokens, 0)
        self.assertEqual(usage.completion_tokens_details.reasoning_tokens, 0)

    def test_a_stream_is_the_same_reply_in_pieces(self):
        whole = self.ask("List the months of the year.").choices[0].message.content
        chunks = list(self.ask("List the months of the year.", stream=True))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}, {
            (chunks[0].id, chunks[0].created, "tiny-diffusion", chunks[0].system_fingerprint)})
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks), whole)
        self.assertEqual([c.choices[0].finish_reason for c in chunks], [None] * (len(chunks) - 1) + ["stop"])
        self.assertTrue(all(c.usage is None for c in chunks))

    def test_usage_comes_last_when_it_is_asked_for(self):
        *chunks, last = self.ask(stream=True, stream_options={"include_usage": True})
        self.assertEqual(last.choices, [])
        self.assertEqual(last.usage.completion_tokens, self.ask().usage.completion_tokens)
        self.assertTrue(chunks and all(c.usage is None for c in chunks))

    def test_the_helper_that_follows_a_stream_ends_with_the_reply(self):
        with self.client.chat.completions.stream(model="tiny-diffusion", messages=user(capital("Italy")), seed=1) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        self.assertLessEqual({"chunk", "content.delta", "content.done"}, kinds)
        self.assertEqual(final.choices[0].message.content, "The capital of Italy is Rome.")
        self.assertEqual(final.choices[0].finish_reason, "stop")

    def test_every_shape_of_a_message_is_taken(self):
        parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": capital("Italy")},
            {"role": "assistant", "content": None, "refusal": None},
            {"role": "user", "content": parts, "name": "reader"},
        ]
        reply = self.client.chat.completions.create(model="tiny-diffusion", messages=messages, seed=1)
        self.assertEqual(reply.choices[0].finish_reason, "stop")

    def test_our_own_message_is_taken_back(self):
        first = self.ask(capital("France")).choices[0].message
        messages = user(capital("France")) + [first] + user(capital("Spain"))
        reply = self.client.chat.completions.create(model="tiny-diffusion", messages=messages, seed=1)
        self.assertEqual(reply.choices[0].message.content, "The capital of Spain is Madrid.")

    def test_stop_strings_and_limits_end_a_reply(self):
        stopped = self.ask("List the months of the year.", stop=["April"]).choices[0]
        self.assertEqual((stopped.message.content, stopped.finish_reason), ("January, February, March, ", "stop"))
        cut = self.ask("List the months of the year.", max_completion_tokens=3)
        self.assertEqual((cut.choices[0].finish_reason, cut.usage.completion_tokens), ("length", 3))

    def test_thoughts_come_beside_the_reply(self):
        more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
        message = self.ask("What is 3 + 4?", **more).choices[0].message
        self.assertEqual(message.content, "3 + 4 = 7")
        self.assertTrue(message.reasoning_content)
        effort = self.ask("What is 3 + 4?", reasoning_effort="high").choices[0].message
        self.assertEqual(effort.reasoning_content, message.reasoning_content)

    def test_what_has_no_effect_is_accepted(self):
        more = {"user": "u", "metadata": {"k": "v"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
                "prompt_cache_key": "p", "extra_body": {"a_field_of_another_server": 1}}
        self.assertEqual(self.ask(**more).choices[0].message.content, self.ask().choices[0].message.content)

    def test_a_raw_answer_shows_status_and_headers(self):
        raw = self.client.chat.completions.with_raw_response.create(model="tiny-diffusion", messages=user("hi"), seed=1)
        self.assertEqual(raw.status_code, 200)
        self.assertEqual(raw.headers["content-type"], "application/json")
        self.assertEqual(raw.parse().object, "chat.completion")


class Texts(unittest.TestCase):
    """The older API, which continues texts."""

    @classmethod
    def setUpClass(cls):
        cls.client = client(smollm2())

    def complete(self, prompt, **more):
        more = {"max_tokens": 12, "temperature": 0} | more
        return self.client.completions.create(model="smollm2", prompt=prompt, **more)

    def test_a_text_and_its_stream(self):
        whole = self.complete("The capital of France is")
        self.assertEqual(whole.object, "text_completion")
        self.assertIn("Paris", whole.choices[0].text)
        self.assertEqual(whole.choices[0].finish_reason, "length")
        chunks = list(self.complete("The capital of France is", stream=True))
        self.assertEqual("".join(c.choices[0].text for c in chunks), whole.choices[0].text)
        self.assertEqual(chunks[-1].choices[0].finish_reason, "length")

    def test_token_ids_are_taken_for_a_text(self):
        reply = self.complete([19556, 905], max_tokens=4)
        self.assertEqual(reply.usage.prompt_tokens, 2)

    def test_no_character_is_broken(self):
        chunks = self.complete("Emoji: 😀😃😄😁😆😅🤣😂🙂🙃", max_tokens=40, stream=True)
        self.assertNotIn("\ufffd", "".join(c.choices[0].text for c in chunks))


class Models(unittest.TestCase):
    def test_models_are_listed_and_found(self):
        models = client(miniature()).models
        [model] = list(models.list())
        self.assertEqual((model.id, model.object, model.owned_by), ("tiny-diffusion", "model", "axe"))
        self.assertEqual(models.retrieve("tiny-diffusion"), model)
        with self.assertRaises(openai.NotFoundError) as caught:
            models.retrieve("gpt-4")
        self.assertEqual(caught.exception.code, "model_not_found")


class Errors(unittest.TestCase):
    def test_what_is_wrong_with_a_request_is_named(self):
        ask = client(miniature()).chat.completions.create
        for more, param in (({"temperature": 3}, "temperature"), ({"messages": []}, "messages"),
                            ({"max_tokens": 0}, "max_tokens"), ({"modalities": ["audio"]}, "modalities"),
                            ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens")):
            for stream in (False, True):
                with self.subTest(param=param, stream=stream), self.assertRaises(openai.BadRequestError) as caught:
                    ask(**{"model": "tiny-diffusion", "messages": user("hi"), "stream": stream} | more)
                self.assertEqual(caught.exception.param, param)
                self.assertEqual(caught.exception.type, "invalid_request_error")
                self.assertIn(param, caught.exception.message)

    def test_another_model_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            client(miniature()).chat.completions.create(model="gpt-4", messages=user("hi"))
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))

    def test_a_prompt_that_does_not_fit_is_told_so(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            client(miniature()).chat.completions.create(model="tiny-diffusion", messages=user("hi " * 3000))
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        self.assertGreater(caught.exception.body["n_prompt_tokens"], caught.exception.body["n_ctx"])

    def test_keys(self):
        daemon = start("keys", AXE_API_KEY="right")
        self.addCleanup(daemon.stop)
        with self.assertRaises(openai.AuthenticationError) as caught:
            client(daemon, api_key="wrong").models.list()
        self.assertEqual(caught.exception.code, "invalid_api_key")
        self.assertEqual(caught.exception.response.headers["www-authenticate"], "Bearer")
        self.assertEqual(len(list(client(daemon, api_key="right").models.list())), 1)


class Slot(unittest.TestCase):
    """One slot and its queue, under a client that waits, gives up, or comes again."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = smollm2()

    def setUp(self):
        eventually("the daemon is idle", lambda: idle(self.daemon))
        self.client = client(self.daemon)
        self.before = cancelled(self.daemon)

    def endless(self, client=None, **more):
        ask = (client or self.client).chat.completions.create
        return ask(model="smollm2", messages=user("Write a long story."), **ENDLESS | more)

    def freed(self):
        eventually("the slot is free", lambda: idle(self.daemon) and cancelled(self.daemon) == self.before + 1)
        answer = self.client.chat.completions.create(model="smollm2", messages=user("hi"), max_tokens=2)
        self.assertEqual(answer.usage.completion_tokens, 2)

    def test_closing_a_stream_frees_the_slot(self):
        stream = self.endless(stream=True)
        for _, chunk in zip(range(5), stream):
            self.assertIsNone(chunk.choices[0].finish_reason)
        stream.close()
        self.freed()

    def test_a_timeout_is_the_clients_and_frees_the_slot(self):
        with self.assertRaises(openai.APITimeoutError):
            self.endless(timeout=0.5)
        self.freed()

    def test_what_the_operator_cancels_raises_in_the_stream(self):
        stream = self.endless(stream=True)
        next(iter(stream))
        running = operator(self.daemon, "GET", "/queue")["running"]
        operator(self.daemon, "POST", f"/cancel/{running['id']}")
        with self.assertRaises(openai.APIError) as caught:
            for chunk in stream:
                self.assertIsNone(chunk.choices[0].finish_reason, "no reply must look complete")
        self.assertEqual(caught.exception.code, "cancelled")
        self.freed()

    def test_a_daemon_that_dies_raises_in_the_stream(self):
        daemon = start("dies", self.daemon.model)
        self.addCleanup(daemon.stop)
        stream = client(daemon).chat.completions.create(
            model=daemon.model.stem, messages=user("Write a long story."), stream=True, **ENDLESS)
        next(iter(stream))
        daemon.kill()
        with self.assertRaises(openai.APIConnectionError):
            for chunk in stream:
                self.assertIsNone(chunk.choices[0].finish_reason, "no reply must look complete")


class FullQueue(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = start("queue", smollm2().model, AXE_SERVER_QUEUE_CAPACITY="1", AXE_MODEL_SERVED_NAME="smollm2")
        cls.addClassCleanup(cls.daemon.stop)

    def figures(self):
        return self.daemon.figure("axe_running"), self.daemon.figure("axe_queue_depth")

    async def until(self, figures):
        await asyncio.to_thread(eventually, f"running and waiting are {figures}", lambda: self.figures() == figures)

    async def asyncSetUp(self):
        """One runs, one waits, and nobody else may."""
        self.client = async_client(self.daemon)
        self.addAsyncCleanup(self.client.close)
        self.tasks = []
        for number in range(2):
            self.tasks.append(asyncio.create_task(self.ask(self.client, **ENDLESS)))
            await self.until((1, number))

    async def asyncTearDown(self):
        await self.hang_up()

    async def hang_up(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.until((0, 0))

    def ask(self, client, **more):
        return client.chat.completions.create(**{"model": "smollm2", "messages": user("Say hello."), "max_tokens": 4} | more)

    async def test_one_too_many_is_told_when_to_come_again(self):
        for stream in (False, True):
            with self.assertRaises(openai.RateLimitError) as caught:
                await self.ask(self.client, stream=stream)
            self.assertEqual(caught.exception.code, "queue_full")
            self.assertGreaterEqual(int(caught.exception.response.headers["retry-after"]), 1)

    async def test_a_client_that_comes_again_is_served(self):
        before = self.daemon.figure('axe_requests_total{outcome="rejected"}')
        patient = async_client(self.daemon, max_retries=8)
        self.addAsyncCleanup(patient.close)
        task = asyncio.create_task(self.ask(patient))
        refused = lambda: self.daemon.figure('axe_requests_total{outcome="rejected"}') > before
        await asyncio.to_thread(eventually, "it is refused", refused)
        await self.hang_up()
        self.assertEqual((await task).usage.completion_tokens, 4)


class Many(unittest.IsolatedAsyncioTestCase):
    async def test_many_at_once_get_each_their_own_answer(self):
        daemon = miniature()
        client = async_client(daemon)
        self.addAsyncCleanup(client.close)

        async def whole(country):
            reply = await client.chat.completions.create(
                model="tiny-diffusion", messages=user(capital(country)), seed=1)
            return reply.choices[0].message.content

        async def streamed(country):
            stream = await client.chat.completions.create(
                model="tiny-diffusion", messages=user(capital(country)), seed=1, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        asked = list(CAPITALS) * 4
        found = await asyncio.gather(*(ask(country) for country in asked for ask in (whole, streamed)))
        expected = [f"The capital of {country} is {CAPITALS[country]}." for country in asked for _ in range(2)]
        self.assertEqual(found, expected)
        await asyncio.to_thread(eventually, "the daemon is idle", lambda: idle(daemon))


if __name__ == "__main__":
    unittest.main()
