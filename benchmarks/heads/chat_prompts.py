"""Prompts of many kinds, for a model that answers them: what draft models for chat learn from.

`prompts` combines templates with subjects, in an order that a seed decides. Every tenth subject of a kind is held out: no training prompt
has it. `QUESTIONS` are held out as well; they have no template.
"""

from __future__ import annotations

import random

PEOPLE = """Ada Lovelace|Albert Einstein|Aristotle|Cleopatra|Charles Darwin|Florence Nightingale|Frida Kahlo
|Galileo Galilei|Isaac Newton|Jane Austen|Johann Sebastian Bach|Leonardo da Vinci|Marie Curie|Martin Luther King|Mozart
|Nelson Mandela|Nikola Tesla|Shakespeare|Socrates|Vincent van Gogh""".replace("\n", "").split("|")
PLACES = """Australia|Brazil|Canada|Cairo|China|Egypt|France|Germany|Greece|Iceland|India|Italy|Japan|Kenya|London
|Mexico|New York|Norway|Paris|Peru|Rome|South Korea|Spain|Sydney|Thailand|the Amazon rainforest|the Grand Canyon
|the Himalayas|the Sahara|Tokyo""".replace("\n", "").split("|")
SCIENCE = """photosynthesis|gravity|black holes|the water cycle|evolution|DNA|plate tectonics|electricity|magnetism
|vaccines|the immune system|climate change|the greenhouse effect|renewable energy|solar panels|nuclear fusion
|quantum mechanics|relativity|the human heart|the brain|sleep|volcanoes|earthquakes|rainbows|the moon|the solar system
|stars|galaxies|atoms|chemical bonds|acids and bases|the periodic table|photons|sound waves|lightning|ocean currents
|coral reefs|bees|dinosaurs|bacteria""".replace("\n", "").split("|")
COMPUTING = """machine learning|neural networks|the internet|databases|operating systems|compilers|encryption|blockchain
|cloud computing|version control|Python|JavaScript|SQL|recursion|sorting algorithms|binary search|hash tables
|linked lists|object-oriented programming|APIs|unit tests|Linux|HTML and CSS|web browsers|computer viruses|big data
|robots|speech recognition|language models|artificial intelligence""".replace("\n", "").split("|")
LIFE = """healthy eating|exercise|meditation|saving money|time management|public speaking|job interviews
|writing a resume|learning a language|gardening|cooking pasta|baking bread|travelling alone|making friends
|studying for exams|remote work|running a marathon|yoga|photography|playing the guitar|chess|painting|reading more books
|better sleep|stress|moving to a new city|owning a dog|raising children|recycling|cycling to work|camping|swimming
|starting a small business|investing|team work|leadership|writing a novel|giving feedback|a healthy breakfast
|home repairs""".replace("\n", "").split("|")
SOCIETY = """democracy|the French Revolution|the Industrial Revolution|World War II|the Roman Empire|ancient Egypt
|the Renaissance|the printing press|the Cold War|human rights|supply and demand|inflation|globalization|taxes|education
|social media|advertising|urbanization|immigration|philosophy|ethics|religion|music|jazz|cinema|poetry|football
|the Olympic Games|architecture|fashion""".replace("\n", "").split("|")
THINGS = """a lost dog|a dragon who is afraid of fire|a robot that learns to paint|two friends and a treasure map
|a lighthouse keeper|a talking tree|a trip to Mars|a magic library|an old clock|a rainy day|a brave mouse
|a baker in a small village|a secret garden|the last bookshop on Earth|a pirate ship|a girl who can fly
|a snowman in summer|a detective and a missing painting|the sea|autumn|the moon and the stars|a mountain
|a cat who solves crimes|a time machine|a lonely whale|an orchestra of animals|a hidden door|a train at night
|a new school|a wise old woman""".replace("\n", "").split("|")
FUNCTIONS = """adds two numbers|reverses a string|checks whether a number is prime|computes the factorial of a number
|finds the largest number in a list|sorts a list|counts the words in a text|removes duplicates from a list
|computes Fibonacci numbers|checks whether a word is a palindrome|merges two sorted lists
|reads a file and prints its lines|converts Celsius to Fahrenheit|computes the average of a list
|finds the common elements of two lists|counts vowels in a string|flattens a nested list|generates a random password
|computes the greatest common divisor|validates an email address|rotates a matrix|parses a CSV file
|finds the longest word in a sentence|implements a stack|implements binary search|checks whether two words are anagrams
|converts a number to binary|prints a multiplication table|computes compound interest|downloads a web page""".replace("\n", "").split("|")
ERRANDS = """a day off|a meeting next week|a refund for a broken phone|a recommendation letter|feedback about a project
|an extension of a deadline|a new laptop|a salary|help with an assignment|an invitation to a birthday party
|a change of an appointment|information about a course|a late delivery|a job opening|a visit to a museum
|a noisy neighbour|a lost suitcase|a subscription that should end|a wrong invoice|a thank-you after an interview""".replace("\n", "").split(
    "|"
)
DISHES = """pancakes|vegetable soup|chocolate cake|fried rice|a fresh salad|pizza|tomato sauce|an omelette|chicken curry
|banana bread|tacos|lentil stew|apple pie|mashed potatoes|sushi|a smoothie|roasted vegetables|cookies|lasagna|hummus""".replace(
    "\n", ""
).split("|")
TEXTS = """The weather is nice today, and we are going to the park with our friends.
|She don't like apples, but her brother eat them every day.
|The company announced that its profits had risen by ten percent in the last quarter.
|Our team has worked hard, however the results was not what we expected.
|I am writing to let you know that the package did not arrive.
|The old house on the hill has been empty for many years, and nobody knows why.
|Scientists have found a new kind of frog in the rainforest, which is no longer than a fingernail.
|He run to the station because the train were late.
|The film was too long, but the actors were wonderful and the music was beautiful.
|We regret to inform you that the event has been cancelled.
|My grandmother always told me that patience is the key to a happy life.
|The city plans to build a new bridge over the river by the end of next year.
|Regular exercise improves the mood, strengthens the heart and helps people to sleep.
|This restaurant is terrible: the food was cold and the waiter was rude.
|Trees take carbon dioxide out of the air, give us shade and are a home for birds.
|I love this phone: the camera is great and the battery lasts two days.""".replace("\n", "").split("|")
PAIRS = """cats and dogs|tea and coffee|trains and planes|books and films|cities and villages|Python and Java
|summer and winter|the sun and the moon|frogs and toads|democracy and monarchy|mitosis and meiosis|RAM and hard disks
|planets and stars|lists and tuples in Python|weather and climate|cash and credit cards|jogging and swimming
|alligators and crocodiles|novels and short stories|electric cars and petrol cars""".replace("\n", "").split("|")

KNOWLEDGE = [*SCIENCE, *COMPUTING, *SOCIETY]
KINDS: list[tuple[list[str], list[str]]] = [  # templates, and what they are about
    ([
        "What is {}?", "Explain {} in simple terms.", "Explain {} to a ten-year-old.", "How does {} work?",
        "Why is {} important?", "Tell me about {}.", "Give me a short summary of {}.", "Write a paragraph about {}.",
        "List five facts about {}.", "What are the main ideas behind {}?", "What are common misconceptions about {}?",
        "What are the advantages and disadvantages of {}?", "Write a short essay about {}.", "Describe {} in three sentences.",
        "Write three quiz questions about {}, with answers.", "What is the history of {}?", "How has {} changed the world?",
        "Give an example of {} in everyday life.", "What should a beginner know about {}?", "Define {}.",
        "I have an exam about {} tomorrow. What should I know?", "Make an outline of a talk about {}.",
        "What is an analogy for {}?", "hi, can you explain {} please", "What might the future of {} look like?",
    ], KNOWLEDGE),
    ([
        "Who was {}?", "What is {} known for?", "Write a short biography of {}.", "List three achievements of {}.",
        "What can we learn from {}?", "Imagine an interview with {}.", "When did {} live?", "Write a letter to {}.",
        "How did {} influence later generations?",
    ], PEOPLE),
    ([
        "Tell me about {}.", "What should I see in {}?", "Plan a three-day trip to {}.", "What is the climate of {} like?",
        "List five interesting facts about {}.", "When is the best time to visit {}?", "What should I pack for a trip to {}?",
        "Describe a morning in {}.", "What is the history of {}?", "What do people eat in {}?",
    ], PLACES),
    ([
        "Give me five tips for {}.", "How can I get better at {}?", "What are the benefits of {}?",
        "I am new to {}. Where do I start?", "Make a weekly plan for {}.", "Write a blog post about {}.",
        "What are common mistakes with {}?", "What do I need for {}?", "How do I stay motivated with {}?",
        "Write a checklist for {}.", "Write a slogan about {}.", "What would an expert say about {}?", "Write a tweet about {}.",
        "Give me three ideas for a video about {}.", "Is {} worth it?",
    ], LIFE),
    ([
        "Write a short story about {}.", "Write a poem about {}.", "Write a haiku about {}.", "Write a bedtime story about {}.",
        "Write the first paragraph of a novel about {}.", "Suggest three titles for a book about {}.",
        "Write a dialogue about {}.", "Write a song about {}.", "Describe {} with all five senses.", "Write a joke about {}.",
        "Continue: Once upon a time there was {}",
    ], THINGS),
    ([
        "Write a Python function that {}.", "Write a JavaScript function that {}.", "How do I write a program that {}?",
        "Write code that {}, and explain it.", "Write a Python function that {}, with a docstring and type hints.",
        "Write a C program that {}.", "Write unit tests for a function that {}.", "Show me a short Python script that {}.",
    ], FUNCTIONS),
    ([
        "Write an email about {}.", "Write a polite letter about {}.", "Write a short message about {}.",
        "Write a formal email to my manager about {}.", "What should I say in a phone call about {}?",
        "Write a friendly reply to an email about {}.", "Give me a template of an email about {}.",
    ], ERRANDS),
    ([
        "How do I make {}?", "Give me a recipe for {}.", "What do I need to cook {}?", "Is {} healthy?",
        "Write a shopping list for {}.", "What goes well with {}?", "How can I make {} without eggs?",
        "Describe the taste of {}.",
    ], DISHES),
    ([
        "Rewrite this more formally: {}", "Summarize in one sentence: {}", "Correct the grammar: {}", "Translate into French: {}",
        "Translate into Spanish: {}", "Is this positive or negative? {}", "Rewrite this in the past tense: {}",
        "What are the nouns in this sentence? {}", "Make this shorter: {}", "Write a reply: {}", "Paraphrase: {}",
        "Repeat the following text, word for word: {}", "Write a headline for this: {}", "Turn this into a bulleted list: {}",
    ], TEXTS),
    ([
        "What is the difference between {}?", "Compare {}.", "Make a table that compares {}.", "Which is better: {}?",
        "What do {} have in common?", "Write a short debate about {}.", "When would I choose one or the other: {}?",
    ], PAIRS),
]  # fmt: skip

QUESTIONS = """What is the capital of France?|Hello! Who are you?|What can you help me with?
|How many days are there in a leap year?|What is 12 times 8?|Why is the sky blue?|Why do cats purr?
|Name the planets of the solar system.|What is the tallest mountain in the world?|How do airplanes fly?
|Count from one to twenty.|Tell me a joke.|What should I cook tonight with rice, eggs and spinach?
|Write a limerick about a programmer.|How do I reverse a linked list?|What does "carpe diem" mean?
|Who wrote Don Quixote?|What is the boiling point of water?|Give me a name for a coffee shop.
|How can I remember people's names?|What is the difference between its and it's?
|Write a regular expression for a phone number.|How do I boil an egg?|What are the primary colors?
|Explain how a bicycle stays upright.|Thank you very much!|What is the meaning of life?|How far away is the sun?
|Write a short product description for a wooden chair.|What are the seasons, and why do they happen?
|List the months of the year.|How do I convince my parents to let me have a hamster?""".replace("\n", "").split("|")

EACH = 10  # every so many subjects of a kind are held out


def held_out(subjects: list[str]) -> set[str]:
    return set(subjects[EACH // 2 :: EACH])


def prompts(count: int | None, seed: int = 0, unseen: bool = False) -> list[str]:
    """`count` different prompts, in an order that `seed` decides. None: all. `unseen`: those that are held out, the questions first."""
    pairs = [
        template.format(subject)
        for templates, subjects in KINDS
        for subject in subjects
        for template in templates
        if (subject in held_out(subjects)) == unseen
    ]
    pairs = sorted(set(pairs))
    random.Random(seed).shuffle(pairs)
    return ((QUESTIONS if unseen else []) + pairs)[:count]
