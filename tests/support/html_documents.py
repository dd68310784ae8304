"""Generated HTML: well-formed documents, and broken ones."""

from hypothesis import strategies as st

TAGS = st.sampled_from(["p", "b", "span", "div", "li", "td", "a"])
WORDS = st.text(st.characters(codec="utf-8", categories=["Lu", "Ll", "Lo"]), min_size=1, max_size=5)
OTHERS = st.sampled_from(["&amp;", "&#233;", "3 < 4", "&nbsp;", ".", "&lt;"])
TEXT = st.lists(st.one_of(WORDS, OTHERS), min_size=1).map(" ".join)
KEPT = ["<script>a<b</script>", "<code>x <i>y</i></code>", "<i translate='no'>z</i>"]
NO_TEXT = st.sampled_from(["<!-- a > b -->", "<br>", *KEPT])
ATTRIBUTES = st.sampled_from(["", " title='a > b'", ' class="x" hidden', " href=x/y"])


@st.composite
def elements(draw, inner):
    name, attributes = draw(TAGS), draw(ATTRIBUTES)
    parts = draw(st.lists(inner, max_size=3))
    return f"<{name}{attributes}>{''.join(parts)}</{name}>"


DOCUMENTS = st.recursive(st.one_of(TEXT, NO_TEXT), elements)
BROKEN = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "<",
                ">",
                "</",
                "/>",
                "<!--",
                "-->",
                "--!>",
                "<!",
                "<?",
                "&",
                "&#",
                ";",
                "'",
                '"',
                "=",
                " ",
                "\n",
                "\x00",
            ]
        ),
        st.sampled_from(
            [
                "<p>",
                "</p>",
                "<code>",
                "<script>",
                "</script",
                "<a b='",
                "<i translate=no>",
                "<svg/>",
                "</i>",
            ]
        ),
        st.text(max_size=4),
    )
).map("".join)
