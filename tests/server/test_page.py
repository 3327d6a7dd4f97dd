"""The page at `/` in a real browser, over a real server: what people do on it, and what it may not do."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_visits import (
    CHROMIUM,
    MARKDOWN,
    WAIT_S,
    WIDE,
    Author,
    Visit,
    browsing,
    colour,
    contrast,
    relaying,
    serving,
    visit_of,
    visiting,
)
from playwright.sync_api import Browser, expect

from coldstream.errors import GenerationFault, OutOfMemoryError, QueueFullError
from coldstream.server.client import ServiceUnavailable
from coldstream.server.local_client import LocalClient
from http_serving import WithTemplate, open_demo

KEY = "correct-horse"
PHONE = {"width": 375, "height": 667}
# A page that a keyboard on the screen leaves little of.
UNDER_KEYBOARD = {"width": 375, "height": 330}
LONG = "\n\n".join(f"Paragraph {number} of a long answer." for number in range(60))

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

Open = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    opened = open_demo()
    with LocalClient(opened, "demo") as client:
        yield client
    opened.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def author(client: LocalClient) -> Author:
    return Author(client)


@pytest.fixture
def visit(browser: Browser, client: LocalClient) -> Open:
    @contextmanager
    def opened(
        served: Any = client,
        viewport: Any = WIDE,
        scheme: Any = "light",
        touch: bool = False,
        **settings: Any,
    ) -> Iterator[Visit]:
        with serving(served, **settings) as url:
            context = browser.new_context(
                viewport=viewport,
                color_scheme=scheme,
                has_touch=touch,
                is_mobile=touch,
                accept_downloads=True,
            )
            with visiting(context, url) as visit:
                yield visit

    return opened


@pytest.mark.sharded(of="processes")
def test_a_chat_by_keyboard_with_settings_and_nothing_from_elsewhere(visit: Open) -> None:
    with visit() as first:
        page = first.page
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("demo")
        first.set(Temperature="0.7", Seed="5", Max_tokens="12")
        before = first.picture
        first.say("import os")
        first.answered()
        once = first.answer
        assert once.strip()
        expect(page.locator(".note").last).to_contain_text("12 tokens · ")
        page.wait_for_function(
            "before => document.getElementById('experts').toDataURL() !== before", arg=before
        )
        expect(page.locator("#experts-summary")).to_have_text(
            re.compile(r"^\d+ experts in \d+ layers, [1-9]\d* used lately")
        )
        first.opened("New chat")
        expect(first.messages).to_have_count(0)
        first.say("import os")
        first.answered()
        assert first.answer == once, "the same seed is the same answer"
        assert first.complaints == []
        assert {url.removeprefix(first.origin).split("/")[0] for url in first.requests} == {""}


def test_settings_are_the_requests_are_kept_and_go_back_to_the_models(visit: Open, author: Author) -> None:
    with visit(author) as each:
        page = each.page
        default = author.model.default_sampling
        each.opened("Settings")
        expect(page.get_by_label("Top k")).to_have_attribute("placeholder", str(default.top_k))
        expect(page.get_by_label("Thinking")).to_be_hidden()  # the template of this model has none
        page.keyboard.press("Escape")
        each.set(
            System_message="Be brief.", Temperature="0.25", Top_p="0.5", Top_k="3", Min_p="0.125", Seed="9"
        )
        page.reload()
        each.say("hi")
        answer = author.answers(each, "hello")
        given = answer.params
        assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.25, 0.5, 3, 0.125)
        assert given.seed == 9
        assert answer.prompt.index("Be brief.") < answer.prompt.index("hi")
        each.opened("Settings")
        each.button("Reset to the model’s defaults").click()
        page.keyboard.press("Escape")
        page.reload()
        each.say("more")
        answer = author.answers(each, "yes")
        assert (answer.params.top_k, answer.params.temperature) == (default.top_k, default.temperature)
        assert "Be brief." not in answer.prompt


def test_stop_keeps_what_was_said_and_another_turn_follows(visit: Open, author: Author) -> None:
    with visit(author) as each:
        each.say("import os")
        answer = author.asked()
        answer.write("It has begun")
        expect(each.messages.last).to_contain_text("It has begun")
        each.button("Stop").click()
        expect(each.page.locator(".note").last).to_have_text("Stopped.")
        assert answer.is_left.wait(WAIT_S), "the server goes on with an answer that was stopped"
        expect(each.button("Stop")).to_be_hidden()
        each.say("and sys")
        assert "It has begun" in author.asked().prompt
        each.page.keyboard.press("Escape")
        each.answered()
        assert each.complaints == []


def test_the_page_follows_the_answer_unless_the_reader_is_elsewhere(visit: Open, author: Author) -> None:
    with visit(author) as each:
        scroller = each.page.locator("#scroller")
        rest = "all => all.scrollHeight - all.scrollTop - all.clientHeight"
        each.say("go on")
        answer = author.asked()
        answer.write(LONG)
        expect(each.messages.last).to_contain_text("Paragraph 59")
        expect(each.button("To the end")).to_be_hidden()
        assert scroller.evaluate(rest) < 2
        scroller.evaluate("all => all.scrollTop = 100")
        expect(each.button("To the end")).to_be_visible()
        answer.write("\n\n" + LONG.replace("long", "longer"))
        expect(each.messages.last).to_contain_text("Paragraph 59 of a longer")
        assert scroller.evaluate("all => all.scrollTop") == 100
        each.button("To the end").press("Enter")
        assert scroller.evaluate(rest) < 2
        answer.write("\n\n" + LONG.replace("long", "longest"))
        expect(each.messages.last).to_contain_text("Paragraph 59 of a longest")
        assert scroller.evaluate(rest) < 2
        answer.end()
        each.answered()
        each.drawn()
        assert scroller.evaluate(rest) < 2
        expect(each.button("To the end")).to_be_hidden()


def test_markdown_is_shown_and_nothing_in_it_can_do_harm(visit: Open, author: Author) -> None:
    with visit(author) as each:
        each.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        each.say("<b>show</b> **it**")
        answer = author.asked()
        answer.write(MARKDOWN[:60])
        heading = each.page.locator(".message.assistant h1")
        expect(heading).to_have_text("Title")
        heading.evaluate("each => each.dataset.same = 'yes'")
        answer.write(MARKDOWN[60:])
        answer.end()
        each.answered()
        expect(heading).to_have_attribute("data-same", "yes")  # what has not changed is not made again
        text = each.page.locator(".message.assistant > .text")
        assert text.locator("strong").inner_text() == "two"
        assert text.locator("td").all_inner_texts() == ["a", "1"]
        assert text.locator("ol > li").count() == 2
        assert text.locator("ol ul li").inner_text() == "inner"
        assert text.locator("figure .language").inner_text() == "python"
        expect(text).to_contain_text(r"\(a_1 + b_1\)")
        links = text.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
        assert {tuple(each[1:]) for each in links} == {("noopener noreferrer", "_blank")}
        assert [each[0] for each in links] == [
            "https://example.com/a",
            "https://example.com/",
            "https://example.com/x.png",
        ]
        for shown in ("javascript:alert(1)", "data:text/html", "<img src=x", "<script>alert(2)"):
            expect(text).to_contain_text(shown)
        assert text.locator("img, script, [style]").count() == 0
        each.page.clock.install()  # a button says so for a moment, which may be over before it is looked at
        for name, copied in (("Copy code", 'print("<b>")'), ("Copy message", MARKDOWN)):
            each.button(name).last.click()
            expect(each.button("Copied")).to_be_visible()
            assert each.page.evaluate("navigator.clipboard.readText()") == copied
            each.page.clock.run_for(1500)
            expect(each.button("Copied")).to_have_count(0)
        assert each.texts[0] == "<b>show</b> **it**"  # own messages as they were typed
        assert each.complaints == []


def test_conversations_are_kept_listed_renamed_and_deleted(visit: Open, author: Author) -> None:
    with visit(author) as each:
        page = each.page
        for question in ("first question", "second question"):
            each.opened("New chat")
            each.say(question)
            author.answers(each, f"answer to the {question}")
        expect(each.kept).to_have_text(["second question", "first question"])
        each.reload()
        expect(each.messages).to_have_count(2)
        assert each.texts == ["second question", "answer to the second question"]
        each.kept.last.press("Enter")
        expect(each.messages.last).to_contain_text("answer to the first question")
        each.button("Rename first question").press("Enter")
        page.get_by_label("Title").fill("the <i>first</i>")
        page.keyboard.press("Enter")
        expect(each.kept.first).to_be_focused()
        expect(each.kept.first).to_have_text("the <i>first</i>")
        page.get_by_label("Search conversations").fill("SECOND answer")
        expect(each.kept).to_have_text(["second question"])
        page.get_by_label("Search conversations").fill("")
        expect(each.kept).to_have_count(2)
        each.button("Delete the <i>first</i>").press("Enter")
        each.button("Cancel").press("Enter")
        expect(each.kept).to_have_count(2)
        each.button("Delete the <i>first</i>").press("Enter")
        each.button("Delete").press("Enter")
        expect(each.kept).to_have_text(["second question"])
        expect(each.messages).to_have_count(0)
        each.reload()
        expect(each.kept).to_have_text(["second question"])


def test_conversations_are_exported_and_imported(visit: Open, author: Author, tmp_path: Path) -> None:
    with visit(author) as each:
        each.say("a question")
        author.answers(each, "an **answer**", "length")
        with each.page.expect_download() as download:
            each.button("Export all").click()
        exported = tmp_path / "all.json"
        download.value.save_as(exported)
        each.button("Delete a question").press("Enter")
        each.button("Delete").press("Enter")
        expect(each.kept).to_have_count(0)
        file = each.page.get_by_label("File to import")
        file.set_input_files(exported)
        expect(each.kept).to_have_text(["a question"])
        expect(each.messages).to_have_count(2)
        assert each.texts == ["a question", "an answer"]
        expect(each.button("Continue")).to_be_visible()
        given = json.loads(exported.read_text())
        given["conversations"][0]["messages"][1]["calls"] = [{"name": "look", "arguments": '{"at": "it"}'}]
        exported.write_text(json.dumps(given))
        file.set_input_files(exported)
        expect(each.kept).to_have_count(2)
        call = each.page.locator(".call")
        expect(call.locator("pre")).to_be_hidden()
        call.get_by_text("Tool call: look").click()
        assert json.loads(call.locator("pre").inner_text()) == {"at": "it"}
        given["conversations"][0]["messages"][1]["role"] = "system"
        exported.write_text(json.dumps(given))
        for broken in (
            exported.read_text(),
            "{",
            '{"format": "other"}',
            '{"format": 1, "conversations": [3]}',
        ):
            exported.write_text(broken)
            file.set_input_files(exported)
            expect(each.page.get_by_role("alert")).to_contain_text("The file cannot be imported")
            each.button("Close").click()
        expect(each.kept).to_have_count(2)


def test_two_tabs_never_overwrite_each_others_conversations(visit: Open, author: Author) -> None:
    with visit(author) as one:
        one.say("from one")
        author.answers(one, "first answer")
        other = visit_of(one.page.context, one.origin)
        other.kept.click()
        expect(other.messages).to_have_count(2)
        other.say("from the other")
        author.answers(other, "second answer")
        expect(one.messages).to_have_count(4)  # a tab that is idle shows what the other one wrote
        one.page.bring_to_front()
        one.say("at once")
        theirs = author.asked()
        other.page.bring_to_front()
        other.say("at once too")
        ours = author.asked()
        for answer, visited in ((theirs, one), (ours, other)):
            answer.write("third answer")
            answer.end()
            visited.page.bring_to_front()
            visited.answered()
            visited.stored()
        expect(one.kept).to_have_count(2)
        expect(one.kept.filter(has_text="(copy)")).to_have_count(1)
        texts = set()
        for title in ("from one", "from one (copy)"):
            # By its title, as the order is that of what each tab stored last.
            one.page.locator("#conversations").get_by_role("button", name=title, exact=True).click()
            expect(one.page.locator("#conversations .current .open")).to_have_text(title)
            texts.add(tuple(one.texts[4:]))
        assert texts == {("at once", "third answer"), ("at once too", "third answer")}


def test_an_edit_and_another_answer_are_beside_the_old_ones(visit: Open, author: Author) -> None:
    with visit(author) as each:
        each.say("old question")
        author.answers(each, "old answer")
        each.say("follow-up")
        author.answers(each, "its answer")
        each.button("Edit message").first.press("Enter")
        each.page.get_by_label("Edited message").fill("new question")
        each.page.keyboard.press("Control+Enter")
        answer = author.answers(each, "new answer")
        assert "new question" in answer.prompt
        assert "old" not in answer.prompt
        assert each.texts == ["new question", "new answer"]
        each.button("Regenerate answer").press("Enter")
        answer = author.answers(each, "newer answer")
        assert "new answer" not in answer.prompt
        assert each.texts == ["new question", "newer answer"]
        each.button("Previous version").last.press("Enter")
        expect(each.messages.last).to_contain_text("new answer")
        each.button("Previous version").first.press("Enter")
        expect(each.messages).to_have_count(4)
        assert each.texts == ["old question", "old answer", "follow-up", "its answer"]
        each.reload()
        expect(each.messages).to_have_count(4)
        each.button("Next version").press("Enter")
        expect(each.messages.last).to_contain_text("newer answer")


def test_an_answer_that_was_truncated_is_continued(visit: Open, author: Author) -> None:
    with visit(author) as each:
        bodies: list[Any] = []
        each.page.on(
            "request",
            lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None,
        )
        each.say("count")
        author.answers(each, "one, two", "length")
        expect(each.page.locator(".note").last).to_contain_text("reached its token limit")
        each.button("Continue").press("Enter")
        assert author.answers(each, ", three").prompt.endswith("one, two")
        assert each.texts == ["count", "one, two, three"]
        expect(each.button("Continue")).to_have_count(0)
        assert bodies[1]["messages"][-1] == {"role": "assistant", "content": "one, two"}
        assert (bodies[1]["continue_final_message"], bodies[1]["add_generation_prompt"]) == (True, False)
        assert "continue_final_message" not in bodies[0]


def test_a_full_context_has_its_own_words_and_the_message_is_kept(visit: Open) -> None:
    long = "import os " * 3000
    with visit() as each:
        each.say(long)
        alert = each.page.get_by_role("alert")
        expect(alert).to_contain_text("The context is full")
        expect(alert).to_contain_text("maximum context length")
        assert each.prompt.input_value().strip() == long.strip()
        expect(each.messages).to_have_count(0)
        alert.get_by_role("button", name="New chat").click()
        expect(alert).to_be_hidden()
        each.set(Temperature="900")
        each.button("Send").click()
        expect(alert).to_contain_text("Temperature: ")


def test_what_is_refused_for_a_while_is_sent_again(visit: Open, author: Author) -> None:
    with visit(author) as each:
        author.refusal = QueueFullError("64 requests wait")
        alert = each.page.get_by_role("alert")
        each.say("one")
        expect(alert).to_contain_text("The server is busy")
        expect(alert).to_contain_text("64 requests wait")
        author.refusal = None
        each.button("Try again").click()
        author.answers(each, "answered")
        expect(alert).to_be_hidden()
        assert each.prompt.input_value() == ""
        author.refusal = OutOfMemoryError("no blocks are free")
        each.prompt.focus()
        each.say("two")
        expect(alert).to_contain_text("Not enough memory")
        author.refusal = ServiceUnavailable("the engine is loading", 1.0)
        each.button("Try again").click()
        expect(alert).to_contain_text("The engine is not ready")
        author.refusal = None
        author.answers(each, "by itself")
        assert each.texts == ["one", "answered", "two", "by itself"]


def test_what_came_before_a_lost_connection_or_an_error_is_kept(browser: Browser, author: Author) -> None:
    with (
        serving(author) as url,
        relaying(url) as relay,
        visiting(browser.new_context(viewport=WIDE), relay.url) as each,
    ):
        each.say("tell")
        answer = author.asked()
        answer.write("half of it")
        expect(each.messages.last).to_contain_text("half of it")
        relay.truncate()
        expect(each.page.locator(".note").last).to_contain_text("The connection was lost.")
        expect(each.page.locator("#state")).to_have_text("The server does not answer.")
        each.button("Continue").click()
        expect(each.page.get_by_role("alert")).to_contain_text("No connection")
        relay.mend()
        each.button("Try again").click()
        answer = author.asked()
        answer.write(" and more")
        answer.fail(GenerationFault("NaN logits"))
        expect(each.page.locator(".note").last).to_contain_text("cut off by an error: NaN logits")
        assert each.texts == ["tell", "half of it and more"]
        each.reload()
        expect(each.button("Continue")).to_be_visible()
        assert each.texts == ["tell", "half of it and more"]


def test_an_answer_goes_on_while_another_conversation_is_read(visit: Open, author: Author) -> None:
    with visit(author) as each:
        each.say("slow")
        author.answers(each, "at first")
        each.say("and more")
        answer = author.asked()
        answer.write("begun")
        expect(each.messages.last).to_contain_text("begun")
        each.opened("New chat")
        each.say("quick")
        author.answers(each, "done")
        expect(each.kept).to_have_text(["quick", "slow"])
        each.kept.filter(has_text="slow").focus()
        answer.write(", and ended")
        each.page.evaluate("fetch('/health')")
        each.drawn()
        assert each.texts == ["quick", "done"]
        answer.end()
        expect(each.kept).to_have_text(["slow", "quick"])
        expect(each.kept.filter(has_text="slow")).to_be_focused()
        assert each.texts == ["quick", "done"]
        each.page.keyboard.press("Enter")
        expect(each.messages.last).to_contain_text("begun, and ended")


def test_a_thought_is_folded_and_can_be_opened(visit: Open, author: Author) -> None:
    thinker = WithTemplate(author)  # type: ignore[arg-type]
    try:
        with visit(thinker) as each:
            each.opened("Settings")
            each.page.get_by_label("Thinking").select_option("on")
            each.page.keyboard.press("Escape")
            each.prompt.focus()
            each.say("import os")
            answer = author.asked()
            assert answer.prompt.endswith("<think>\n")
            answer.write("so many *ways*")
            expect(each.messages.last.get_by_text("Thinking …")).to_be_visible()
            answer.write("</think>\n\nhere")
            answer.end()
            each.answered()
            assert each.texts[-1] == "here"
            thought = each.page.locator(".reasoning").last
            expect(thought.locator(".text")).to_be_hidden()
            thought.locator("summary").press("Enter")
            expect(thought.locator(".text")).to_have_text("so many ways")
    finally:
        thinker.model.chat_template.close()


def test_a_key_is_asked_for_a_wrong_one_is_said_to_be_and_a_right_one_kept(visit: Open) -> None:
    with visit(api_keys=(KEY,)) as each:
        page = each.page
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        each.prompt.focus()
        each.say("hi")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("API key needed")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(field).to_be_focused()  # the engine view was refused again
        each.button("Send").click()
        expect(alert).to_contain_text("Wrong API key")
        field.fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        expect(alert).to_be_hidden()
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        expect(field).to_be_hidden()
        assert all(KEY not in url for url in each.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_send_and_stop_and_needs_no_sideways_scrolling(
    visit: Open, author: Author, scheme: str
) -> None:
    with visit(author, viewport=PHONE, scheme=scheme, touch=True) as each:
        page = each.page
        expect(page.locator("#state")).to_have_text("ready")
        assert each.page.locator("#list, #engine").filter(visible=True).count() == 0
        each.prompt.fill("x" * 400)
        each.button("Send").tap()
        answer = author.asked()
        answer.write(
            LONG + "\n\n```\n" + "wide " * 99 + "\n```\n\n" + "|" + "cell|" * 30 + "\n" + "|-" * 30 + "|\n"
        )
        expect(page.locator(".message.assistant table")).to_be_visible()
        for size in (PHONE, UNDER_KEYBOARD):
            page.set_viewport_size(size)  # type: ignore[arg-type]
            each.drawn()
            for name in ("Send", "Stop"):
                box = each.button(name).bounding_box()
                assert box is not None
                assert 0 <= box["x"] <= size["width"] - box["width"], (name, size, box)
                assert 0 <= box["y"] <= size["height"] - box["height"], (name, size, box)
                assert min(box["width"], box["height"]) >= 44
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        each.button("Stop").tap()
        each.answered()
        for name in ("--text", "--quiet", "--accent", "--bad"):
            for ground in ("--page", "--panel", "--raised", "--own"):
                assert contrast(colour(page, name), colour(page, ground)) >= 4.5, (name, ground)
        assert contrast(colour(page, "--on-accent"), colour(page, "--accent")) >= 4.5
        assert contrast(colour(page, "--bad"), colour(page, "--bad-ground")) >= 4.5
        sizes = page.locator("button:visible").evaluate_all("all => all.map(b => b.offsetHeight)")
        assert min(sizes) >= 44
        each.button("Conversations").tap()
        each.button("Close conversations").tap()
        expect(page.locator("#list")).to_be_hidden()
        each.button("Conversations").tap()
        page.locator("#conversations .open").tap()
        expect(page.locator("#list")).to_be_hidden()


def test_every_control_has_a_name_and_the_map_is_read_by_keys(visit: Open) -> None:
    with visit() as each:
        page = each.page
        unnamed = page.locator("input, textarea, select").evaluate_all(
            "all => all.filter(each => each.labels.length !== 1).map(each => each.id)"
        )
        assert unnamed == []
        nameless = page.locator("button").evaluate_all(
            "all => all.filter(each => !(each.ariaLabel || each.innerText || each.textContent.trim())).length"
        )
        assert nameless == 0
        expect(page.locator("#experts-summary")).to_contain_text("experts in")
        page.locator("#experts").press("ArrowRight")
        expect(page.locator("#experts-cell")).to_have_text(re.compile(r"Layer 0, expert 1: used by \d+ %"))
        page.keyboard.press("ArrowDown")
        expect(page.locator("#experts-cell")).to_contain_text("Layer 1, expert 1")


def test_the_policy_lets_nothing_but_the_files_of_the_server_run(visit: Open) -> None:
    with visit() as each:
        ran = each.page.evaluate(
            """async () => {
                const script = document.createElement('script');
                try { script.append('window.wasRun = true'); document.body.append(script); } catch {}
                await import('data:text/javascript,window.wasRun = true').catch(() => null);
                return window.wasRun === true;
            }"""
        )
        assert not ran
        parsed = each.page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; return true; } catch { return false; } }"
        )
        assert not parsed
        refused = each.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
        assert refused == "refused"
        assert any("Content Security Policy" in text for text in each.complaints)
