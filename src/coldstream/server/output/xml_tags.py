"""The tags of calls in XML, see `xml_calls.py`."""

from typing import Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
