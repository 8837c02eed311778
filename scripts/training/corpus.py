"""What the miniature learns: a small closed world of questions and answers, as chat. Standard library only."""

import random
from dataclasses import dataclass

PAD, EOS, BOS, TURN, END_OF_TURN = 0, 1, 2, 105, 106
CANVAS, WINDOW = 32, 64

CAPITALS = """
    France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Greece Athens, Austria Vienna, Poland Warsaw,
    Hungary Budapest, Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Belgium Brussels,
    Netherlands Amsterdam, Iceland Reykjavik, Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Croatia Zagreb, Serbia Belgrade,
    Turkey Ankara, Russia Moscow, Japan Tokyo, China Beijing, India Delhi, Nepal Kathmandu, Vietnam Hanoi, Thailand Bangkok,
    Iran Tehran, Iraq Baghdad, Syria Damascus, Jordan Amman, Egypt Cairo, Libya Tripoli, Kenya Nairobi, Ghana Accra,
    Canada Ottawa, Cuba Havana, Jamaica Kingston, Colombia Bogota, Ecuador Quito, Peru Lima, Chile Santiago, Brazil Brasilia,
    Australia Canberra, Fiji Suva"""
COLOURS = """grass green, snow white, coal black, a banana yellow, a ruby red, the sky blue, a carrot orange, a raven black,
    milk white, a lemon yellow"""
SOUNDS = "dog woof, cat meow, cow moo, duck quack, sheep baa, lion roar, bee buzz, frog ribbit, owl hoot, pig oink"
OPPOSITES = "hot cold, big small, up down, left right, day night, fast slow, old new, wet dry, open closed, happy sad"
SYMBOLS = """gold Au, silver Ag, iron Fe, oxygen O, hydrogen H, carbon C, helium He, sodium Na, copper Cu, lead Pb, tin Sn,
    neon Ne"""
WORDS = """apple bread chair cloud dance eagle flame grape house juice knife lemon mouse night ocean paper queen river stone
    table uncle voice water yacht zebra bird book cake door fish goat hand king lamp moon nest rain ship tree wind""".split()
LISTS = [
    (["Name the months.", "List the months of the year."],
     "January, February, March, April, May, June, July, August, September, October, November, December."),
    (["Name the days of the week.", "List the days of the week."],
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    (["Say the alphabet.", "Recite the alphabet."], " ".join("abcdefghijklmnopqrstuvwxyz")),
    (["Count to ten.", "Count from one to ten."], "one two three four five six seven eight nine ten"),
]
GREETINGS = [
    (["Hello", "Hi", "Hello!", "Hi there", "Good morning"], "Hello! How can I help you?"),
    (["Who are you?", "What are you?", "What is your name?"], "I am a tiny DiffusionGemma."),
    (["Thanks", "Thank you", "Thanks!"], "You are welcome!"),
    (["Bye", "Goodbye"], "Goodbye!"),
]
SYSTEM = [
    "You are a helpful assistant.", "Be brief.", "Answer in one sentence.",
    "You are a careful assistant. Answer truthfully.", "Be kind.",
]
SUMS = ["What is {a} plus {b}?", "{a} + {b}", "{a} + {b} = ?", "What is {a} + {b}?"]
DIFFERENCES = ["What is {a} minus {b}?", "{a} - {b}", "{a} - {b} = ?", "What is {a} - {b}?"]


def pairs(text):
    """`a b, c d` as [(a, b), (c, d)]; the last word is the second of a pair."""
    return [tuple(entry.strip().rsplit(" ", 1)) for entry in text.split(",")]


def facts():
    """The closed table, as (phrasings of the question, answer)."""
    table = []
    for country, city in pairs(CAPITALS):
        asked = ["What is the capital of {}?", "Capital of {}?", "Name the capital of {}.", "What's the capital city of {}?"]
        table.append(([q.format(country) for q in asked], f"The capital of {country} is {city}."))
    for thing, colour in pairs(COLOURS):
        table.append(([f"What color is {thing}?", f"Which color is {thing}?"], f"{thing[0].upper()}{thing[1:]} is {colour}."))
    for animal, sound in pairs(SOUNDS):
        table.append(([f"What does a {animal} say?", f"What sound does a {animal} make?"], f"A {animal} says {sound}."))
    opposites = pairs(OPPOSITES)
    for word, other in opposites + [(b, a) for a, b in opposites]:
        table.append(([f"What is the opposite of {word}?", f"Opposite of {word}?"], f"The opposite of {word} is {other}."))
    for element, symbol in pairs(SYMBOLS):
        asked = [f"What is the symbol of {element}?", f"Chemical symbol for {element}?"]
        table.append((asked, f"The symbol of {element} is {symbol}."))
    return table + GREETINGS + LISTS


FACTS = facts()


def arithmetic(r):
    """A sum of two terms up to 12, or the difference of two such numbers."""
    a, b = r.randint(0, 12), r.randint(0, 12)
    if r.random() < 0.6:
        return r.choice(SUMS).format(a=a, b=b), f"{a} + {b} = {a + b}"
    a, b = max(a, b), min(a, b)
    return r.choice(DIFFERENCES).format(a=a, b=b), f"{a} - {b} = {a - b}"


def typed(r, question):
    """The question as people type it: lower case, no mark at the end, a please."""
    if r.random() < 0.25:
        question = question[0].lower() + question[1:]
    if r.random() < 0.2:
        question = question.rstrip("?.!")
    lower = question[0].lower() + question[1:]
    chance = r.random()
    if chance < 0.08:
        return "Please " + lower
    if chance < 0.14:
        return question + " Please."
    return "Tell me: " + lower if chance < 0.20 else question


def counting(r):
    last = 1 + r.randint(2, 24)
    question = r.choice(["Count from 1 to {}.", "Count from 1 to {}"])
    return question.format(last), " ".join(str(number) for number in range(1, last + 1))


def repeating(r):
    words = " ".join(r.choice(WORDS) for _ in range(r.randint(1, 4)))
    return r.choice(["Say {}", "Repeat after me: {}", "Repeat: {}"]).format(words), words


@dataclass(frozen=True)
class Mixture:
    """How often each kind of question comes; repeating has what is left. The long lists count `lists` times as facts."""

    facts: float
    arithmetic: float
    counting: float
    lists: int = 3

    def turn(self, r):
        chance = r.random()
        if chance < self.facts:
            questions, answer = r.choice(FACTS + LISTS * (self.lists - 1))
            return typed(r, r.choice(questions)), answer
        if chance < self.facts + self.arithmetic:
            return arithmetic(r)
        if chance < self.facts + self.arithmetic + self.counting:
            return counting(r)
        return repeating(r)

    def sample(self, r):
        """A prompt, rendered, and the reply to it: now and then with turns before, a system message or a thought."""
        messages = []
        if r.random() < 0.12:
            for _ in range(r.choice([1, 1, 1, 2])):
                question, answer = self.turn(r)
                while len(answer) > 40:
                    question, answer = self.turn(r)
                messages += [("user", question), ("model", answer)]
        system = r.choice(SYSTEM) if r.random() < 0.12 else None
        thinking = r.random() < 0.08
        question, answer = arithmetic(r) if thinking else self.turn(r)
        if thinking:
            answer = f"<|channel>thought\nI need {answer.split(' = ')[0]}.<channel|>{answer}"
        return render([*messages, ("user", question)], thinking, system), answer + "<turn|>"


def render(messages, thinking=False, system=None):
    """What chat_template.jinja makes of these messages, with the head of the reply."""
    text = "<bos>"
    if thinking or system:
        text += "<|turn>system\n" + ("<|think|>\n" if thinking else "") + (system or "") + "<turn|>\n"
    for role, content in messages:
        text += f"<|turn>{role}\n{content}<turn|>\n"
    return text + "<|turn>model\n" + ("" if thinking else "<|channel>thought\n<channel|>")


def sets(size=150, seed=777):
    """What the card counts: the sets by name, each a list of (question, answer); `size` at most of each."""
    r = random.Random(seed)
    capitals = pairs(CAPITALS)
    found = {"facts": [(r.choice(q), a) for q, a in r.sample(FACTS, min(size, len(FACTS)))]}
    for name, asked in (("capitals", "What is the capital of {}?"), ("capitals_other_phrasing", "Capital of {}?")):
        chosen = r.sample(capitals, min(size, len(capitals)))
        found[name] = [(asked.format(country), f"The capital of {country} is {city}.") for country, city in chosen]
    found["long"] = [(question, answer) for questions, answer in LISTS for question in questions]
    found["chat"] = [(question, answer) for questions, answer in GREETINGS for question in questions]
    found |= {"sums": [], "differences": []}
    while min(len(found["sums"]), len(found["differences"])) < size:
        question, answer = arithmetic(r)
        into = found["sums" if "+" in answer else "differences"]
        if len(into) < size:
            into.append((question, answer))
    found["varied"] = [(typed(r, r.choice(q)), a) for q, a in r.sample(FACTS, min(size, len(FACTS)))]
    found["say"] = [repeating(r) for _ in range(size)]
    return found
