"""Text in HTML."""


def text(value: object) -> str:
    """Text for HTML. Control characters, which no markup may hold, are shown as their pictures."""
    visible = "".join(_picture(character) for character in str(value))
    return visible.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20 and character not in "\n\t":
        return chr(0x2400 + code)
    if 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE:
        return "\ufffd"
    return character
