"""Parts of the page by themselves, in a real browser: what a visit would show too late or too slowly."""

from collections.abc import Iterator
from typing import Any

import pytest
from page_visits import CHROMIUM, MARKDOWN, WIDE, Author, browsing, serving, visiting
from playwright.sync_api import Browser, Page, expect

from coldstream.server.local_client import LocalClient

LISTS = """1. a

2. b

text
2. c

- x

      y
- z

***

head
===

> q
lazy

    code

~~~
open"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, local_client: LocalClient) -> Iterator[Page]:
    with serving(local_client) as url, visiting(browser.new_context(), url) as visit:
        yield visit.page


def test_an_answer_that_grows_looks_like_one_that_came_whole(page: Page) -> None:
    """Only its end is read again while it grows: each beginning looks as if it was read from the start."""
    differences = page.evaluate(
        """async texts => {
            const { Markdown } = await import('/page/markdown.js');
            const differences = [];
            for (const text of texts) {
                const growing = new Markdown();
                for (let end = 1; end <= text.length; end += 1) {
                    growing.show(text.slice(0, end), false);
                    const whole = new Markdown();
                    whole.show(text.slice(0, end), true);
                    const isEqual = growing.element.innerHTML === whole.element.innerHTML;
                    if (!isEqual) differences.push(text.slice(0, end));
                }
            }
            return differences;
        }""",
        [MARKDOWN, LISTS, "a\r\nb\r\n\r\nc\r\n\r\n| a |\r\n|---|\r\n| b |\r\n\r\nd"],
    )
    assert differences == []


def test_the_oldest_conversations_go_when_there_are_too_many(page: Page) -> None:
    titles = page.evaluate(
        """async () => {
            const { openStore } = await import('/page/store.js');
            const { newConversation } = await import('/page/conversation.js');
            const store = await openStore({ conversations: 4, chars: 2000 });
            const write = (title, updated, content) => store.write({
                ...newConversation(), title, updated,
                messages: [{ id: 1, parent: null, role: 'user', content }],
            });
            for (let n = 0; n < 6; n += 1) await write(`c${n}`, n, '');
            const byNumber = (await store.list()).map(each => each.title);
            for (let n = 0; n < 3; n += 1) await write(`big${n}`, 10 + n, 'x'.repeat(700));
            return [byNumber, (await store.list()).map(each => each.title)];
        }"""
    )
    assert titles == [["c5", "c4", "c3", "c2"], ["big2", "big1"]]


def test_a_conversation_that_could_not_be_written_is_not_written_as_a_copy_later(page: Page) -> None:
    kept = page.evaluate(
        """async () => {
            const { openStore } = await import('/page/store.js');
            const { newConversation } = await import('/page/conversation.js');
            const store = await openStore();
            const conversation = { ...newConversation(), title: 'a' };
            await store.write(conversation);
            conversation.messages = [() => 'no browser keeps functions'];
            const failure = await store.write(conversation).then(() => '', error => error.name);
            conversation.messages = [];
            await store.write(conversation);
            return [failure, (await store.list()).map(({ title, revision }) => [title, revision])];
        }"""
    )
    assert kept == ["DataCloneError", [["a", 2]]]


@pytest.mark.sharded(of="processes")
def test_a_conversation_that_is_deleted_while_it_is_written_does_not_come_back(page: Page) -> None:
    titles = page.evaluate(
        """async () => {
            const { Chat } = await import('/page/chat.js');
            const { openStore } = await import('/page/store.js');
            const store = await openStore();
            const nothing = () => {};
            const on = { change: nothing, problem: nothing, contextUsed: nothing, saving: nothing };
            const chat = new Chat(document.createElement('div'), store, { toEnd: nothing }, on);
            const { conversation } = chat;
            conversation.title = 'a';
            const saved = [chat.save(conversation), chat.save(conversation)];
            await Promise.all([...saved, chat.remove(conversation.id)]);
            return (await store.list()).map(({ title }) => title);
        }"""
    )
    assert titles == []


@pytest.mark.sharded(of="processes")
def test_the_page_says_that_it_saves_until_its_last_state_is_stored(page: Page) -> None:
    heard = page.evaluate(
        """async () => {
            const { Chat } = await import('/page/chat.js');
            const heard = [];
            const drawn = () => new Promise(requestAnimationFrame);
            const store = { write: ({ title }) => drawn().then(() => heard.push(title)) };
            const nothing = () => {};
            const saving = isPending => heard.push(isPending);
            const on = { change: nothing, problem: nothing, contextUsed: nothing, saving };
            const chat = new Chat(document.createElement('div'), store, { toEnd: nothing }, on);
            const first = chat.save(chat.conversation);
            await Promise.all([first, chat.save(chat.conversation)]);
            chat.conversation.title = 'later';
            await chat.save(chat.conversation);
            return heard;
        }"""
    )
    assert heard == [True, True, "", "", False, True, "later", False]


@pytest.mark.sharded(of="processes")
def test_an_answer_that_comes_behind_a_later_one_is_not_shown(page: Page) -> None:
    """A look at the engine that was refused, where the next one, with another key, was not."""
    heard = page.evaluate(
        """async () => {
            const { Engine } = await import('/page/engine.js');
            const heard = [], answers = [], answered = window.fetch;
            const engine = new Engine({}, () => heard.push('refused'), () => {});
            engine.take = live => heard.push(live.state);
            window.fetch = () => new Promise(answer => answers.push(answer));
            const looks = [engine.look(), engine.look()];
            window.fetch = answered;
            answers[1](Response.json({ state: 'ready' }));
            await looks[1];
            answers[0](Response.json({ error: { message: 'no' } }, { status: 401 }));
            await looks[0];
            return heard;
        }"""
    )
    assert heard == ["ready"]


@pytest.mark.parametrize(
    ("memory", "free", "shown"),
    [
        ({"num_blocks": 4, "num_window_blocks": 0}, {"num_blocks": 1, "num_window_blocks": 0}, "75 %"),
        (
            {"num_blocks": 4, "num_window_blocks": 8},
            {"num_blocks": 3, "num_window_blocks": 0},
            "25 %, windows 100 %",
        ),
    ],
)
def test_the_cache_in_use_counts_blocks_of_windows(page: Page, memory: Any, free: Any, shown: str) -> None:
    """They may be full where hardly any of the others is used."""
    text = page.evaluate(
        """async ([memory, free]) => {
            const { Engine } = await import('/page/engine.js');
            const engine = new Engine({ show() {} }, () => {}, () => {});
            const statistics = { memory, free_memory: free, prefixes: { kept: 0 } };
            engine.take({ state: 'ready', progress: {}, clock_s: 1, statistics });
            return document.getElementById('blocks').textContent;
        }""",
        [memory, free],
    )
    assert text == shown


def test_a_browser_that_keeps_nothing_shows_the_page(browser: Browser, local_client: LocalClient) -> None:
    author = Author(local_client)
    context = browser.new_context(viewport=WIDE)
    context.add_init_script(
        """for (const name of ['localStorage', 'sessionStorage', 'indexedDB']) {
            Object.defineProperty(window, name, { get() { throw new DOMException('no', 'SecurityError'); } });
        }"""
    )
    with serving(author) as url, visiting(context, url) as each:
        each.say("one")
        author.answers(each, "kept for now")
        expect(each.page.locator("#list-note")).to_contain_text("This browser keeps nothing")
        each.opened("New chat")
        each.kept.click()
        expect(each.messages.last).to_contain_text("kept for now")
        assert each.complaints == []


def test_motion_is_only_for_those_who_want_it(browser: Browser, local_client: LocalClient) -> None:
    author = Author(local_client)
    with serving(author) as url, visiting(browser.new_context(), url) as each:
        each.say("hi")
        answer = author.asked()
        waiting = each.page.locator(".waiting")
        moves = "each => getComputedStyle(each, '::before').animationName"
        assert waiting.evaluate(moves) != "none"
        each.page.emulate_media(reduced_motion="reduce")
        assert waiting.evaluate(moves) == "none"
        answer.end()
        each.answered()
