"""What the requests of all protocols are made of: kinds of fields, JSON objects, and the errors about them.

Where a validator replaces pydantic's own check, its `json_schema_input_type` says what the OpenAPI document
shows for the field.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails

from monograph.errors import did_you_mean
from monograph.ranges import Range
from monograph.serve.refused import Refused

MAX_TOOLS = 128

_Model = TypeVar("_Model", bound=BaseModel)


# ── kinds of fields ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Expected:
    """What the error for a wrong value says that the field allows.

    A field's annotation contains it if pydantic's own message would be unclear; `_refusal` reads it.

    Attributes:
        words: the end of the sentence "expected ...".
        shows_value: whether the error shows the wrong value, too.
    """

    words: str
    shows_value: bool = False


def number_within(allowed: Range) -> PlainValidator:
    """Return a validator that refuses all values but the numbers in a range.

    It can also be used for fields whose default is None: a field that is missing or null is not validated.
    """
    bounds = Field(ge=allowed.low, le=allowed.high)

    def check(value: object, info: ValidationInfo) -> Any:
        if not allowed.holds(value):
            name = info.field_name
            raise Refused(400, f"{name} = {value!r:.80}: expected {allowed.expected}", name)
        return value

    number_type = int if allowed.whole else float
    return PlainValidator(check, json_schema_input_type=Annotated[number_type, bounds])


_NotSupported = Annotated[
    Any,
    WithJsonSchema(
        {
            "enum": [None, False, 0, "", [], {}, "none"],
            "description": "Is not supported, and would change the text: other values are refused.",
        }
    ),
]


def not_supported(advice: str, code: str = "unsupported_parameter") -> PlainValidator:
    """Return a validator of a field that is not supported and would change the text.

    It accepts only values that turn the field off, and returns None for them.

    Args:
        advice: what to do instead.
        code: the protocol's name of the error.
    """

    def check(value: object, info: ValidationInfo) -> None:
        name = str(info.field_name)
        is_off = not value or value == "none"
        if not is_off:
            raise Refused(400, f"{name} is not supported: {advice}", name, code)

    return PlainValidator(check, json_schema_input_type=_NotSupported)


Ignored = Annotated[Any, WithJsonSchema({"description": "Is accepted and changes nothing."})]
MustBeEmpty = Annotated[
    Any,
    WithJsonSchema(
        {"enum": [None, False, 0, "", [], {}], "description": "Any other value is refused."}
    ),
]


# ── objects ────────────────────────────────────────────────────────────────────────────────────────


class Body(BaseModel):
    """A JSON object; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: object) -> Any:
        """Return the body without the fields that are null, and refuse unknown fields."""
        if not isinstance(body, dict):  # pydantic itself refuses it
            return body
        # A field has an alias if pydantic reserves its name for itself, as it does `schema`.
        known = {field.alias or name for name, field in cls.model_fields.items()}
        fields_set = {name: value for name, value in body.items() if value is not None}
        for name in fields_set:
            if name not in known:
                hint = did_you_mean(name, known)
                raise Refused(400, f"there is no field {name!r:.80}{hint}", name)
        return fields_set

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema, in which every field that is not required may be null."""
        # The handler may return a reference to the schema, so that is looked up.
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, value in schema.get("properties", {}).items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = _nullable(value)
        return schema


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's JSON schema, changed so that it also allows null, and without its title."""
    # A default of None says nothing.
    annotations = {
        key: schema[key] for key in ("default", "description") if schema.get(key) is not None
    }
    constraints = {
        key: inner
        for key, inner in schema.items()
        if key not in ("default", "description", "title")
    }
    # A schema without constraints allows every value.
    allows_null = not constraints or None in constraints.get("enum", ())
    if allows_null:
        return constraints | annotations
    if "anyOf" not in constraints:
        constraints = {"anyOf": [constraints]}
    # If the schema has null already, it is moved to the end.
    options = [option for option in constraints["anyOf"] if option != {"type": "null"}]
    return constraints | {"anyOf": [*options, {"type": "null"}]} | annotations


class AnyTextPart(Body):
    """A part of a content that has a text. Each subclass says which types it may have."""

    type: str
    text: str


# ── reading ────────────────────────────────────────────────────────────────────────────────────────

# What the error for a missing field says: one entry for each field that a request must have.
_MISSING_WORDS = {
    "model": "GET /v1/models says which there are",
    "prompt": "expected a text, a list of texts, or lists of token ids",
    "messages": "expected a list of messages",
    "input": "expected a text or a list of items",
    "max_tokens": "expected the maximum number of tokens of the answer",
    "tokens": "expected a list of token ids",
    "lora_name": "expected the adapter's name",
    "lora_path": "expected the name of a folder in --adapter-dir",
}
# What was expected, for the error about a value of another type, by pydantic's name of the error.
_TYPE_WORDS = {
    "string_type": "a text",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def read(model: type[_Model], body: dict[str, Any], **context: int) -> _Model:
    """Return a body as a request of type `model`.

    Args:
        model: the type of request.
        body: the JSON object.
        context: numbers of the server's model: `rows`, the largest n of a request for texts, or
            `vocabulary`, the number of token ids, for a request to decode tokens.

    Raises:
        Refused: a field is wrong; the error names it.
    """
    try:
        return model.model_validate(body, context=context)
    except ValidationError as error:
        raise _refusal(model, error) from None


def read_object(model: type[_Model], value: object, place: str, field: str) -> _Model:
    """Return a JSON object that is in the value of a field, as an object of type `model`.

    Args:
        model: the type.
        value: the object as JSON has it.
        place: its place in the request, such as "tools[0]", which an error names.
        field: the request's field, such as "tools".

    Raises:
        Refused: the object is wrong.
    """
    try:
        return model.model_validate(value)
    except Refused as refused:  # there is an unknown field somewhere inside
        raise Refused(400, f"{place}: {refused}", field) from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        # The place of the fault inside the object, such as "tools[0].function.name".
        inner = place
        for step in fault["loc"]:
            inner += f"[{step}]" if isinstance(step, int) else f".{step}"
        if fault["type"] == "missing":
            raise Refused(400, f"{inner} is missing", field) from None
        words = _expected_words(fault)
        raise Refused(400, f"{inner} = {fault['input']!r:.80}: expected {words}", field) from None


def read_as(model: type[BaseModel]) -> PlainValidator:
    """Return a validator of a field that is an object of type `model`.

    Its errors name the whole path to a wrong value inside the object. (For an error of pydantic itself,
    `_refusal` shows only the last name of the path.)
    """

    def check(value: object, info: ValidationInfo) -> BaseModel:
        name = str(info.field_name)
        return read_object(model, value, name, name)

    return PlainValidator(check, json_schema_input_type=model)


def list_of_tools(tool_type: type[BaseModel]) -> PlainValidator:
    """Return a validator of a field that is a list of up to `MAX_TOOLS` objects of type `tool_type`."""

    def check(value: object, info: ValidationInfo) -> list[BaseModel]:
        field = str(info.field_name)
        if not isinstance(value, list) or len(value) > MAX_TOOLS:
            raise Refused(400, f"{field}: expected a list of up to {MAX_TOOLS} tools", field)
        return [
            read_object(tool_type, each, f"{field}[{index}]", field)
            for index, each in enumerate(value)
        ]

    shown = Annotated[list[tool_type], Field(max_length=MAX_TOOLS)]  # type: ignore[valid-type]
    return PlainValidator(check, json_schema_input_type=shown)


ToolChoiceWord = Literal["none", "auto", "required"]
TOOL_CHOICE_DESCRIPTION = (
    "none: the model does not see the tools. auto, which is the default: it may call them. required: "
    "it does. Or the function that it calls once."
)


def tool_choice_or(named_type: type[BaseModel], form: str) -> PlainValidator:
    """Return a validator of a field that is one of `ToolChoiceWord`, or an object that names a tool.

    Args:
        named_type: the type of such an object.
        form: its form, for the error.
    """

    def check(value: object, info: ValidationInfo) -> str | BaseModel:
        field = str(info.field_name)
        if isinstance(value, str) and value in get_args(ToolChoiceWord):
            return value
        if isinstance(value, dict):
            return read_object(named_type, value, field, field)
        words = ", ".join(get_args(ToolChoiceWord))
        raise Refused(400, f"{field} = {value!r:.80}: expected {words} or {form}", field)

    return PlainValidator(check, json_schema_input_type=ToolChoiceWord | named_type)


def text_or_parts(part_type: type[AnyTextPart]) -> PlainValidator:
    """Return a validator of a content, which becomes one text.

    The content is a text, or a list of parts of type `part_type`, whose texts are joined.
    """
    kinds = get_args(part_type.model_fields["type"].annotation)

    def check(value: object, info: ValidationInfo) -> str:
        field = str(info.field_name)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            message = f"{field} = {value!r:.80}: expected a text or a list of parts"
            raise Refused(400, message, field)
        texts = []
        for index, part in enumerate(value):
            # The type is checked first: a part of another type also has other fields, which would be
            # refused as unknown.
            if isinstance(part, dict) and part.get("type") not in kinds:
                known = " or ".join(kinds)
                message = f"{field}[{index}].type = {part.get('type')!r:.80}: expected {known}"
                raise Refused(400, message, field)
            texts.append(read_object(part_type, part, f"{field}[{index}]", field).text)
        return "".join(texts)

    shown = str | list[part_type]  # type: ignore[valid-type]
    return PlainValidator(check, json_schema_input_type=shown)


def _refusal(model: type[BaseModel], error: ValidationError) -> Refused:
    """Return the refusal for the first error that pydantic has found in a request."""
    fault = error.errors(include_url=False)[0]
    # The names from the request's own field to the wrong one inside it, without the indices of lists.
    path = [step for step in fault["loc"] if isinstance(step, str)]
    outer = path[0]
    inner = path[-1]
    is_missing = fault["type"] == "missing"
    is_inside = len(path) > 1
    if is_missing and not is_inside:
        return Refused(400, f"{inner} is missing: {_MISSING_WORDS[inner]}", inner)
    # `Expected` describes the form of the field's whole value. This is the clearest answer if the value has
    # another form, also if only a part of it is missing. About a wrong value inside a list or an object,
    # pydantic's message is more exact.
    if is_missing or not is_inside:
        for expected in model.model_fields[outer].metadata:
            if isinstance(expected, Expected):
                shown = f" = {fault['input']!r:.80}" if expected.shows_value else ""
                return Refused(400, f"{outer}{shown}: expected {expected.words}", outer)
    words = _expected_words(fault)
    return Refused(400, f"{inner} = {fault['input']!r:.80}: expected {words}", inner)


def _expected_words(fault: ErrorDetails) -> str:
    """Return what was expected, in words, for the error about a wrong value."""
    if fault["type"] == "literal_error":
        return str(fault["ctx"]["expected"])
    return _TYPE_WORDS.get(fault["type"], fault["msg"])
