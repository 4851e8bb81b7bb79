"""Words and units beside a value: those ignored, those compared, and those that leave no answer."""

from __future__ import annotations

from rlmath.answers.question import MAX_QUESTION_CHARS, read_question
from rlmath.answers.verifier import verify
from tests.answers.table import check_table


def is_right(question: str, gold: str, answer: str) -> bool:
    return verify(f"\\boxed{{{answer}}}", [gold], question=question).correct


APPLES = "Anna has 3 red apples and buys 4 more. How many apples does she have?"
MILES = "A car drives at 60 miles per hour for 3 hours. How far does it get?"
SPEED = "A car gets 180 miles far in 3 hours. How fast is it?"


def test_a_word_that_is_not_known_to_change_nothing_makes_no_answer():
    words = (
        "thou",
        "mega",
        "incorrect",
        "never",
        "wrong",
        "bogus",
        "tenfold",
        "fewer",
        "k",
        "kilo",
        "squared",
        "each",
        "nines",
        "short of ten",
        "of a thousand",
        "oranges",
    )
    texts = [f"7 {word}" for word in words]
    texts += [f"7 \\text{{ {word}}}" for word in words if len(word) > 1]
    texts += [f"7 ({word})" for word in words if len(word) > 1]
    texts += [f"\\text{{{word}: }} 7" for word in words if len(word) > 1]
    texts += [f"\\text{{{word}}} = 7" for word in words if len(word) > 1]
    texts += ["7 (+1)", "7\\%\\%", "7\\%\\%\\%\\%", "7^\\circ{}^\\circ"]
    rows = [(question, "7", text, False) for text in texts for question in (APPLES, "")]
    check_table(is_right, rows)


def test_a_word_that_changes_a_value_does_so_where_the_question_has_it():
    words = (
        "twice",
        "thrice",
        "halved",
        "nearly",
        "almost",
        "never",
        "except",
        "under",
        "minus",
        "doubled",
    )
    question = f"Say {', '.join(words)}. What is left of 10 apples if 3 are sold?"
    texts = [f"{word} 7" for word in words]
    texts += [f"7 {word}" for word in words]
    texts += [f"\\text{{{word} }} 7" for word in words]
    texts += [f"7 \\text{{ {word}}}" for word in words]
    texts += [f"\\text{{{word}}} = 7" for word in words]
    check_table(is_right, [(question, "7", text, False) for text in texts])
    check_table(
        is_right,
        [
            ("How many of them never vote?", "7", "7 apples", False),
            ("How many never vote?", "7", "7 never", True),
            (question, "7", "7 apples", True),
        ],
    )


def test_a_number_word_that_the_question_counts_may_also_multiply():
    check_table(
        is_right,
        [
            ("How many million people live there?", "7", "7 million", True),
            ("How many million people live there?", "7000000", "7 million", True),
            ("How many thousand dollars?", "5000", "5 thousand dollars", True),
            ("How many dozen eggs?", "84", "7 dozen", True),
            ("How many dozen eggs?", "7", "84 dozen", False),
            ("How many dozen eggs?", "84", "8 dozen", False),
            ("How many pairs?", "14", "7 pairs", False),
        ],
    )


def test_a_word_of_the_question_is_ignored_in_singular_and_plural():
    check_table(
        is_right,
        [
            (APPLES, "7", "7 apples", True),
            (APPLES, "7", "7 \\text{ apple}", True),
            (APPLES, "7", "7 \\text{ red apples}", True),
            (APPLES, "7", "7 \\text{ (apples)}", True),
            (APPLES, "7", "\\text{apples} = 7", True),
            (APPLES, "7", "7 green apples", False),
            (APPLES, "7", "3 + 4 = 7 \\text{ apples}", True),
            (APPLES, "7", "3 + 5 = 7 \\text{ apples}", False),
            (APPLES, "7", "3 + 4 = 7 \\text{ pears}", False),
            (APPLES, "7", "7 more", False),
            (APPLES, "7", "\\text{red apples: } 7", True),
            ("Two dozen eggs cost less than 7 euros.", "7", "\\text{dozen: } 7", False),
            ("Two dozen eggs cost less than 7 euros.", "7", "\\text{dozen } 7", False),
            ("Two dozen eggs cost less than 7 euros.", "7", "\\text{less: } 7", False),
            ("Two dozen eggs cost less than 7 euros.", "7", "\\text{pairs: } 7", False),
            ("Two dozen eggs cost less than 7 euros.", "7", "\\$\\text{dozen } 7", False),
            ("In what year did he turn 17?", "1469", "\\text{the year } 1469", True),
            ("In what year did he turn 17?", "1469", "\\text{year: } 1469", True),
            ("In what year did he turn 17?", "1469", "\\text{page } 1469", False),
            ("How many boxes fit?", "5", "5 \\text{ box}", True),
            ("How many boxes fit?", "5", "5 box", True),
            ("Each child gets a berry. How many?", "5", "5 children", True),
            ("Each child gets a berry. How many?", "5", "5 berries", True),
            ("How many horses and glasses?", "5", "5 \\text{ glass}", True),
            ("How many horses and glasses?", "5", "5 \\text{ horse}", True),
            ("Find $abcd$ if $ab = 1$ and $cd = 2$.", "2", "2 abcd", False),
        ],
    )


def test_without_a_question_only_units_of_the_reference_and_articles_are_ignored():
    check_table(
        is_right,
        [
            ("", "7", "7 apples", False),
            ("", "7", "7 cm", False),
            ("", "7", "\\$7", False),
            ("", "7 apples", "7 \\text{ of the apples}", True),
            ("", "7 apples", "7", True),
            ("", "7 apples", "7 \\text{ apples}", True),
            ("", "7 apples", "7 \\text{ red apples}", False),
            ("", "7 \\text{ red apples}", "7 apples", True),
            ("", "7 apples", "7 oranges", False),
            ("", "7 cm", "7", True),
            ("", "7 cm", "70 \\text{ mm}", True),
            ("", "7 cm", "7 km", False),
            ("", "7 cm", "7 \\text{ cm long}", False),
        ],
    )


def test_a_unit_beside_a_bare_reference_stands_in_the_question():
    check_table(
        is_right,
        [
            (MILES, "180", "180 miles", True),
            (MILES, "180", "180 \\text{ mi}", True),
            (MILES, "180", "180 km", False),
            (MILES, "180", "3 \\cdot 60 = 180 \\text{ miles}", True),
            (MILES, "180", "3 \\cdot 60 = 180 \\text{ km}", False),
            (MILES, "180", "d = 3 \\cdot 60 = 180 \\text{ miles}", True),
            (SPEED, "60", "60 mph", True),
            (SPEED, "60", "60 \\text{ miles per hour}", True),
            (SPEED, "60", "60 \\text{ km/h}", False),
            ("A car drives at 60 mph. How far does it get in 3 hours?", "180", "180 miles", True),
            ("A square has side 5 cm. What is its area?", "25", "25 \\text{ cm}^2", True),
            (
                "A square has side 5 cm. What is its area?",
                "25",
                "25 \\text{ square centimeters}",
                True,
            ),
            ("A square has side 5 cm. What is its area?", "25", "25 \\text{ square inches}", False),
            ("Eggs cost $2 each. What do 9 eggs cost?", "18", "\\$18", True),
            ("Eggs cost $2 each. What do 9 eggs cost?", "18", "$18", True),
            ("Eggs cost $2 each. What do 9 eggs cost?", "18", "18 \\text{ dollars}", True),
            ("Eggs cost $2 each. What do 9 eggs cost?", "18", "18 \\text{ euros}", False),
            ("Eggs cost $2 each. What do 9 eggs cost?", "18", "18 \\text{ cents}", False),
            ("Pens cost $2 each. What do 9 cost?", "18", "€18 \\text{ each}", False),
            ("Pens cost $2 each. What do 9 cost?", "18", "\\$18 \\text{ each}", True),
            ("What is its area in hectares?", "5", "5 \\text{ square hectometers}", False),
            ("What is its area in hectares?", "5", "5 \\text{ hectares}", True),
            ("Let $x$ be $5$ more than $3$. Find $x$.", "8", "\\$8", False),
            ("What is the measure of angle $A$?", "60", "60^\\circ", True),
            ("What is the measure of $\\angle A$?", "60", "60 \\text{ degrees}", True),
            ("How many ducks are there?", "60", "60^\\circ", False),
            ("A ball of mass $3 \\mathrm{~kg}$ falls.", "5", "5 \\text{ kg}", True),
            ("A ball falls 5 m in 2 s.", "5", "5 \\text{ m/s}", True),
            ("A ball falls in the air.", "5", "5 \\text{ inches}", False),
        ],
    )


def test_a_currency_without_its_pair_of_dollars_is_one():
    check_table(
        is_right,
        [
            ("", "$80", "80 cents", False),
            ("", "$80", "80 euros", False),
            ("", "$80", "80 \\text{ cents}", False),
            ("", "$5", "5 cents", False),
            ("", "$64", "64 km", False),
            ("", "$80", "80", True),
            ("", "$80", "\\$80", True),
            ("", "$80", "$80", True),
            ("", "$80", "80 dollars", True),
            ("", "$80", "8000 cents", True),
            ("", "-$80", "-80", True),
            ("", "-$80", "80", False),
            ("", "80$", "80 cents", False),
            ("", "80$", "80", True),
            ("", "$1,250.50", "1250.50", True),
            ("", "$1.5 million", "1500000", True),
            ("", "$5 and $6", "5, 6", True),
            ("", "$5 and $6", "5 cents, 6 cents", False),
            ("", "$5$ and $6$", "5, 6", True),
            ("", "$x+1", "x+1", True),
            ("", "\\$80", "80 cents", False),
        ],
    )


def test_a_unit_of_the_reference_may_be_left_out():
    check_table(
        is_right,
        [("", f"-21 {letter}", "-21", True) for letter in "mgshL"]
        + [("", f"-21 {letter}", f"-21 \\text{{ {letter}}}", True) for letter in "mgshL"]
        + [
            ("", "-21 m", "21", False),
            ("", "-21 m", "-21 g", False),
            ("", "1/2 cup", "1/2", True),
            ("", "1/2 cup", "0.5 cups", True),
            ("", "6 egg", "6", True),
            ("", "6 eggs", "6 egg", True),
            ("", "5 box", "5", True),
            ("", "5 boxes", "5 box", True),
            ("", "2 abc", "2", False),
            ("", "2 xyz", "2", False),
            ("", "6 egg", "6 box", False),
        ],
    )


def test_numbers_in_other_words():
    check_table(
        is_right,
        [
            ("", "-7", "negative 7", True),
            ("", "-7", "minus 7", True),
            ("", "-7", "\\text{negative } 7", True),
            ("", "-\\frac12", "\\text{negative }\\frac12", True),
            ("", "7", "negative 7", False),
            ("", "12", "a dozen", True),
            ("", "24", "two dozen", True),
            ("", "100", "a hundred", True),
            ("", "13", "a dozen", False),
            ("", "105", "7!!", True),
            ("", "48", "6!!", True),
            ("", "1", "1!!", True),
            ("", "5040", "7!!", False),
            ("", "105", "7!!!", False),
        ],
    )


def test_a_reference_that_looks_rounded_takes_the_exact_value():
    check_table(
        is_right,
        [
            ("", "33.3", "100/3", True),
            ("", "33.3", "\\frac{100}{3}", True),
            ("", "33.3", "33\\frac13", True),
            ("", "33.3", "33.29", True),
            ("", "3.14", "\\pi", True),
            ("", "1.41", "\\sqrt2", True),
            ("", "33.3", "101/3", False),
            ("", "33.3", "33", False),
            ("", "2", "2.4", False),
            ("", "2", "7/3", False),
            ("", "0.5", "0.46", False),
            ("", "0.5", "6/13", False),
            ("", "0.33", "1/3", False),
            ("", "\\pi", "3.14", False),
        ],
    )


def test_a_chain_of_inequalities_may_be_read_from_its_other_end():
    check_table(
        is_right,
        [
            ("", "a<x<b", "b>x>a", True),
            ("", "a<x<b", "a<x<b", True),
            ("", "a \\le x < b", "b > x \\ge a", True),
            ("", "a<x<b", "b<x<a", False),
            ("", "a<x<b", "b \\ge x>a", False),
            ("", "a<b<c<d", "d>c>b>a", True),
            ("", "2a<x<a+b", "b+a>x>a+a", True),
            ("", "a<b", "b>a", True),
            ("", "a<b", "a>b", False),
        ],
    )


def test_labelled_parts_are_compared_by_their_labels():
    gold = "\\text{(a) } 12, \\text{ (b) } 30"
    check_table(
        is_right,
        [
            ("", reference, answer, right)
            for reference in ("(a) 12 (b) 30", gold)
            for answer, right in (
                ("(a) 12 (b) 30", True),
                ("(b) 30 (a) 12", True),
                ("(b) 30, (a) 12", True),
                ("(b) 12 (a) 30", False),
                ("(b) 12, (a) 30", False),
                ("(b) 12; (a) 30", False),
                ("(a) 30 (b) 12", False),
                ("12, 30", True),
                ("30, 12", False),
            )
        ]
        + [
            ("", "(a) 1 (b) 2 (c) 3", "(c) 3 (a) 1 (b) 2", True),
            ("", "(a) 1 (b) 2 (c) 3", "(c) 1 (a) 2 (b) 3", False),
            ("", "(i) 1 (ii) 2", "(ii) 2 (i) 1", True),
            ("", "(i) 1 (ii) 2", "(ii) 1 (i) 2", False),
            ("", "(1) 5 (2) 6", "(2) 5 (1) 6", False),
            ("", "12, 30", "(b) 12 (a) 30", False),
            ("", "12, 30", "(b) 30 (a) 12", True),
        ],
    )


def test_boxes_with_labels_keep_the_order_of_their_labels():
    def right(completion: str) -> bool:
        return verify(completion, ["(a) 1 (b) 2 (c) 3"]).correct

    check_table(
        right,
        [
            ("(a) $\\boxed{1}$ (b) $\\boxed{2}$ (c) $\\boxed{3}$", True),
            ("(a) $\\boxed{1}$ (c) $\\boxed{2}$ (b) $\\boxed{3}$", False),
        ],
    )


def test_an_interval_is_no_list_of_two_numbers():
    check_table(
        is_right,
        [
            ("", "2,3", "[2,3]", False),
            ("", "2,3", "[2,3)", False),
            ("", "2,3", "(2,3]", False),
            ("", "2, 3", "\\left[2, 3\\right)", False),
            ("", "2 and 3", "[2,3]", False),
            ("", "x=2,y=3", "[2,3]", False),
            ("", "2,3", "(2,3)", True),
            ("", "2,3", "2, 3", True),
            ("", "2,3", "\\{2,3\\}", True),
            ("", "[2,3]", "2,3", False),
            ("", "[2,3]", "[2,3]", True),
        ],
    )


def test_an_empty_last_box_is_no_answer():
    def answered(completion: str) -> tuple[bool, str]:
        verdict = verify(completion, ["7"])
        return verdict.correct, verdict.verdict

    check_table(
        answered,
        [
            ("\\boxed{7}\\boxed{}", (False, "no_answer")),
            ("$\\boxed{7}$ and $\\boxed{ }$", (False, "no_answer")),
            ("$\\boxed{7}$, $\\boxed{}$", (False, "no_answer")),
            ("\\boxed{}, \\boxed{7}", (True, "string")),
        ],
    )


def test_yes_and_no_with_their_reasons():
    check_table(
        is_right,
        [
            ("", "No, 91 = 7 * 13", "no", True),
            ("", "No, $91 = 7 \\cdot 13$", "No", True),
            ("", "No, 91 = 7 * 13", "yes", False),
            ("", "Yes, 97 is prime", "yes", True),
            ("", "no", "No, it is true, yes", False),
        ],
    )


def test_a_question_is_read_within_bounds():
    hostile = (
        "a " * 500_000,
        "$" * 1_000_000,
        "$5 and " * 200_000,
        "\\text{" * 200_000,
        "{" * 1_000_000,
        "9" * 1_000_000,
        "x" * 1_000_000,
        "\\(" * 500_000,
        "1\\," * 300_000,
        "\\mathrm{~" * 100_000,
        "\x00\ud800",
    )
    for question in hostile:
        assert not verify("\\boxed{7 bogus}", ["7"], question=question).correct, question[:20]
        assert verify("\\boxed{\\sqrt{49}}", ["7"], question=question).correct, question[:20]
    far = "How many apples are there? " + "x " * MAX_QUESTION_CHARS + " Give the number of pears."
    assert {"apple", "pear"} <= read_question(far).words
    assert len(read_question(far).words) < 20


PAGES = "Tom reads 20 pages a day. How many pages does he read in 6 days?"
TAP = "A tap fills 30 liters in 5 minutes. How many liters does it fill per minute?"
WAGE = "Ann earns $15 an hour and works 8 hours a day. How much does she earn in a day?"
RIDE = "Lee rides 45 km in 3 hours. How many hours does he need for 60 km at this speed?"


def test_a_rate_is_right_only_where_it_is_asked_for():
    check_table(
        is_right,
        [
            (PAGES, "120", "120 \\text{ pages}", True),
            (PAGES, "120", "120 \\text{ pages per day}", False),
            (PAGES, "120", "120 \\text{ pages a day}", False),
            (PAGES, "120", "120 \\text{ pages/day}", False),
            ("How many pages a day are 120 in 6 days?", "20", "20 \\text{ pages per day}", True),
            ("How many pages are read daily?", "20", "20 \\text{ pages per day}", False),
            ("He reads for 6 days. How many pages daily?", "20", "20 \\text{ pages/day}", True),
            (TAP, "6", "6 \\text{ liters}", True),
            (TAP, "6", "6 \\text{ liters per minute}", True),
            (TAP, "6", "6 \\,\\frac{\\text{L}}{\\text{min}}", True),
            (TAP, "6", "6 \\text{ minutes per liter}", False),
            (TAP, "6", "6 \\,\\frac{\\text{min}}{\\text{L}}", False),
            (WAGE, "120", "\\$120", True),
            (WAGE, "120", "\\$120 \\text{ per day}", True),
            (WAGE, "120", "\\$120 \\text{ a day}", True),
            (WAGE, "120", "\\$120 \\text{ per hour}", False),
            (WAGE, "120", "\\$120 \\text{ an hour}", False),
            (RIDE, "4", "4 \\text{ hours}", True),
            (RIDE, "4", "4 \\text{ km per hour}", False),
            (RIDE, "4", "4 \\text{ per hour}", False),
            (RIDE, "4", "4 \\text{ hours per km}", False),
            ("A car drives at 60 mph. How far in 3 hours?", "180", "180 \\text{ mph}", False),
            ("How much faster is 90 km/h than 60 km/h?", "30", "30 \\text{ km/h}", True),
            ("A car drives 90 km in 3 hours. How fast is it?", "30", "30 \\text{ km/h}", True),
            ("What is the speed in mph?", "30", "30 \\text{ mph}", True),
            ("What is the speed in mph?", "30", "30 \\text{ miles per hour}", True),
            ("Give the rate in s$^{-1}$.", "5", "5 \\text{ s}^{-1}", True),
        ],
    )


SQUARE = "A square has side 5 cm."
FENCE = "A garden is 10 m long and 6 m wide. How many meters of fence go around it?"


def test_a_length_an_area_and_a_volume_are_no_units_of_each_other():
    check_table(
        is_right,
        [
            (f"{SQUARE} What is its area?", "25", "25 \\text{ cm}^2", True),
            (f"{SQUARE} What is its area?", "25", "25 \\text{ cm}^3", False),
            (f"{SQUARE} What is its area?", "25", "25 \\text{ cubic centimeters}", False),
            (f"{SQUARE} Find its perimeter.", "20", "20 \\text{ cm}", True),
            (f"{SQUARE} Find its perimeter.", "20", "20 \\text{ cm}^2", False),
            (
                f"{SQUARE} Find its perimeter and area.",
                "20,25",
                "20\\text{ cm},25\\text{ cm}^2",
                True,
            ),
            ("What is the volume of a cube of 2 m?", "8", "8 \\text{ m}^3", True),
            ("What is the volume of a cube of 2 m?", "8", "8 \\text{ m}^2", False),
            ("What is its volume in cubic meters?", "8", "8 \\text{ square meters}", False),
            ("How many square meters is it?", "8", "8 \\text{ m}^2", True),
            ("How many square meters is it?", "8", "8 \\text{ m}", False),
            ("What is its area in cm$^2$?", "8", "8 \\text{ cm}^2", True),
            ("What is the area? Give your answer in cm.", "8", "8 \\text{ cm}^2", True),
            (FENCE, "32", "32 \\text{ m}", True),
            (FENCE, "32", "32 \\text{ m}^2", False),
            ("A cube holds 8 cubic feet. How long is its edge?", "2", "2 \\text{ feet}", True),
            ("Find the side of a square whose area is 9 cm$^2$.", "3", "3 \\text{ cm}", True),
            ("How many liters flow per minute?", "3", "3 \\text{ liters}", True),
        ],
    )


def test_things_that_are_counted_are_no_units():
    check_table(
        is_right,
        [
            (PAGES, "120", "120 \\text{ days}", False),
            ("How many quarters make $5?", "20", "\\$20", False),
            ("How many quarters make $5?", "20", "20 \\text{ quarters}", True),
            ("How many more does Ann pay than Bob, who pays $6?", "4", "\\$4", True),
            ("How many extra working hours are 45 hours?", "5", "5 \\text{ hours}", True),
            ("How many units long is the side of 5 cm?", "5", "5 \\text{ cm}", True),
            ("How many coins are $2? Give the amount in dollars.", "2", "\\$2", True),
        ],
    )


def test_a_multiple_that_the_question_asks_in_may_stand_beside_the_value():
    revenue = "What is the revenue in thousands of dollars?"
    check_table(
        is_right,
        [
            (revenue, "250", "250 \\text{ thousand dollars}", True),
            (revenue, "250", "250 \\text{ thousand}", True),
            (revenue, "250", "\\$250 \\text{ thousand}", True),
            (revenue, "250", "250 \\text{ million dollars}", False),
            ("3 million live in A and 4 in B. How many, in millions?", "7", "7 million", True),
            ("What was its profit, in millions?", "3", "3000000", False),
            ("It is sold in thousands of shops. How many are left?", "7", "7 thousand", False),
        ],
    )


def test_yes_and_no_with_equations_and_contradictions():
    check_table(
        is_right,
        [
            ("", "No", "No, 51 = 3 \\cdot 17", True),
            ("", "No", "\\text{No } (51 = 3 \\cdot 17)", True),
            ("", "No, 91 = 7 * 13", "\\text{No}, 91 = 13 \\cdot 7", True),
            ("", "No", "No, 51 = 3 \\cdot 18", False),
            ("", "No", "No, 3 = 3 = 4", False),
            ("", "No", "No, 7", False),
            ("", "No", "Yes, 51 = 3 \\cdot 17", False),
            ("", "Yes", "\\text{Yes, 97 is a prime number}", True),
            ("", "Yes", "\\text{Yes, 97 is not a prime number}", False),
            ("", "Yes", "\\text{Yes, it is true}", True),
            ("", "No", "\\text{No, it is true}", False),
            ("", "No", "\\text{No, it is even}", True),
        ],
    )
