"""The values of `format` in JSON schemas, as patterns of whole texts."""

from typing import Final

_DATE: Final = (
    r"(?:[0-9]{4}-(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|[0-9]{4}-(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|[0-9]{4}-02-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_H16: Final = r"[0-9a-fA-F]{1,4}"
_IPV6: Final = "|".join(
    [
        rf"(?:{_H16}:){{7}}{_H16}",
        *(
            rf"{f'{_H16}(?::{_H16}){{{left - 1}}}' if left else ''}::"
            rf"{f'(?:{_H16}(?::{_H16}){{0,{6 - left}}})?' if left < 7 else ''}"
            for left in range(8)
        ),
    ]
)
# Names have at most 253 characters, and what stands before the @ of an address 64.
_LABEL: Final = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,38}[a-zA-Z0-9])?"
_HOSTNAME: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,5}}"
_ATOM_CHAR: Final = r"[a-zA-Z0-9!#$%&'*+/=?_`{|}~-]"
_LOCAL: Final = rf"{_ATOM_CHAR}{{1,31}}(?:\.{_ATOM_CHAR}{{1,10}}){{0,3}}"
_ESCAPED: Final = "%[0-9A-Fa-f]{2}"
_PATH_CHAR: Final = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_AUTHORITY: Final = (
    rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPED})*@)?"
    rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPED})*|\[(?:{_IPV6})\])(?::[0-9]{{0,5}})?"
)
_DAYS: Final = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS: Final = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

FORMATS: Final = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": f"{_LOCAL}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PATH_CHAR}*)*|/?(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?)"
        rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
    ),
}

# Names that are written beside types, and that no draft of JSON schema gives a meaning for validation.
ANNOTATION_FORMATS: Final = frozenset(
    (
        *(
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "float",
            "double",
            "decimal",
        ),
        *("byte", "binary", "base64", "base64url", "password", "path", "file-path", "directory-path", "text"),
        *("markdown", "html", "json", "json-string", "color", "phone", "unix-time", "timestamp", "enum"),
    )
)
