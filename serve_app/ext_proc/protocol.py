"""The messages of Envoy's external processing service and of gRPC's health service.

Only the fields that are used here stand below, with the numbers that they have in
`envoy/service/ext_proc/v3/external_processor.proto` and in `grpc/health/v1/health.proto`. All
others are skipped. The package `xds-protos` has all of them, but overwrites modules of
`opentelemetry-proto`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS = f"/{EXT_PROC}/Process".encode()
CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"

NONE, STREAMED, BUFFERED, FULL_DUPLEX_STREAMED = 0, 1, 2, 4
"""How bodies are sent here: values of `ProcessingMode.BodySendMode`."""
REPLACE = 2
"""Of a header: `OVERWRITE_IF_EXISTS_OR_ADD`."""
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

PART = "part"
"""Which field of a request is there: one of those that are marked `?` below."""
_MESSAGES = """
HeaderValue          key=1:bytes value=2:bytes raw_value=3:bytes
HeaderMap            headers=1:*HeaderValue
HeaderValueOption    header=1:HeaderValue append_action=3:int32
HeaderMutation       set_headers=1:*HeaderValueOption remove_headers=2:*string
Entry                key=1:string value=2:Struct
Metadata             filter_metadata=1:*Entry
HttpHeaders          headers=1:HeaderMap end_of_stream=3:bool
HttpBody             body=1:bytes end_of_stream=2:bool
HttpTrailers         trailers=1:HeaderMap
ProtocolConfig       request_body_mode=1:int32 response_body_mode=2:int32
ProcessingRequest    request_headers=2:?HttpHeaders response_headers=3:?HttpHeaders \
                     request_body=4:?HttpBody response_body=5:?HttpBody \
                     request_trailers=6:?HttpTrailers response_trailers=7:?HttpTrailers \
                     metadata_context=8:Metadata attributes=9:*Entry observability_mode=10:bool \
                     protocol_config=11:ProtocolConfig
StreamedBodyResponse body=1:bytes end_of_stream=2:bool
BodyMutation         body=1:bytes streamed_response=3:StreamedBodyResponse
CommonResponse       header_mutation=2:HeaderMutation body_mutation=3:BodyMutation
HeadersResponse      response=1:CommonResponse
BodyResponse         response=1:CommonResponse
TrailersResponse     header_mutation=1:HeaderMutation
HttpStatus           code=1:int32
ImmediateResponse    status=1:HttpStatus headers=2:HeaderMutation body=3:bytes
ProcessingResponse   request_headers=1:HeadersResponse response_headers=2:HeadersResponse \
                     request_body=3:BodyResponse response_body=4:BodyResponse \
                     request_trailers=5:TrailersResponse response_trailers=6:TrailersResponse \
                     immediate_response=7:ImmediateResponse dynamic_metadata=8:Struct
HealthCheckRequest   service=1:string
HealthCheckResponse  status=1:int32
"""
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL, "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32, "string": FieldDescriptorProto.TYPE_STRING,
}  # fmt: skip


def _classes() -> dict[str, Any]:
    """Make the classes of all messages, by their names."""
    file = FileDescriptorProto(
        name="tokenyard/ext_proc.proto", package="tokenyard", syntax="proto3",
        dependency=["google/protobuf/struct.proto"],
    )  # fmt: skip
    for line in _MESSAGES.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for field in fields:
            label, _, kind = field.partition(":")
            field_name, _, number = label.partition("=")
            added = message.field.add(name=field_name, number=int(number))
            added.label = added.LABEL_REPEATED if kind[0] == "*" else added.LABEL_OPTIONAL
            if kind[0] == "?":
                if not message.oneof_decl:
                    message.oneof_decl.add(name=PART)
                added.oneof_index = 0
            kind = kind.lstrip("*?")
            if kind in _SCALARS:
                added.type = _SCALARS[kind]
            else:
                package = "google.protobuf" if kind == "Struct" else "tokenyard"
                added.type, added.type_name = added.TYPE_MESSAGE, f".{package}.{kind}"
    pool = DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    made = pool.AddSerializedFile(file.SerializeToString())
    messages = made.message_types_by_name.items()
    return {name: GetMessageClass(message) for name, message in messages}


_CLASSES = _classes()
ProcessingRequest, ProcessingResponse = (
    _CLASSES["ProcessingRequest"],
    _CLASSES["ProcessingResponse"],
)
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
HealthCheckResponse = _CLASSES["HealthCheckResponse"]
