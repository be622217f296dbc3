"""The exceptions of the system, as one tree.

    NpucompileError
    +-- SpecError            a value the user typed (bucket list, mesh, dtype, option) is not legal
    +-- ModelError           a model or a checkpoint cannot be used
    |   +-- UnknownModel     no preset and no checkpoint directory of that name
    |   +-- ConfigError      config.json is malformed or describes something unsupported
    |   +-- CheckpointError  a tensor is missing, misshapen or unreadable
    |   +-- FamilyError      a family's file cannot be used
    +-- GraphError           a program cannot become a legal graph
    |   +-- PrimitiveError   a primitive lacks a rule, or was called with operands it refuses
    |   +-- PartitionError   sharding rules and program disagree
    |   +-- InvariantError   a pass left a graph that breaks a stated invariant
    |   +-- LoweringError    a backend cannot express or compile the graph
    +-- ArtifactError        an artifact directory cannot be used
    |   +-- ArtifactMissing  nothing there, or not an artifact
    |   +-- ArtifactTampered bytes differ from the digest in the manifest
    |   +-- ArtifactStale    built by, or for, something else than what is running
    +-- VerifyError          two executables of one program disagree
    +-- RequestError         one request cannot be served; others are unaffected
    +-- ProtocolError        a peer sent something that is not a message

Every message names both sides of the disagreement and what is legal.
"""


class NpucompileError(Exception):
    """Base of everything npucompile raises on purpose; its text is fit to be shown to a user."""


class SpecError(NpucompileError, ValueError):
    """Raised when a value typed by the user is not legal."""


class ModelError(NpucompileError):
    """Raised when a model or a checkpoint cannot be used."""


class UnknownModel(ModelError):
    """Raised when a name is neither a preset nor a checkpoint directory."""


class ConfigError(ModelError):
    """Raised when config.json is malformed or describes something unsupported."""


class CheckpointError(ModelError):
    """Raised when a checkpoint's tensors do not fit the model."""


class FamilyError(ModelError):
    """Raised when a file with a family of the user's own cannot be used."""


class GraphError(NpucompileError):
    """Raised when a program cannot become a legal graph."""


class PrimitiveError(GraphError):
    """Raised when a primitive lacks a rule or refuses its operands."""


class PartitionError(GraphError):
    """Raised when sharding rules and a program disagree."""


class InvariantError(GraphError):
    """Raised when a graph breaks a stated invariant; names the pass that broke it."""


class LoweringError(GraphError):
    """Raised when a backend cannot express or compile a graph."""


class ArtifactError(NpucompileError):
    """Raised when an artifact directory cannot be used."""


class ArtifactMissing(ArtifactError):
    """Raised when there is no artifact at a path."""


class ArtifactTampered(ArtifactError):
    """Raised when an artifact's bytes differ from the digests in its manifest."""


class ArtifactStale(ArtifactError):
    """Raised when an artifact was built by, or for, something else than what is running."""


class VerifyError(NpucompileError):
    """Raised when two executables of one program disagree."""


class RequestError(NpucompileError, ValueError):
    """Raised when one request cannot be served.

    Args:
        message: both sides of the disagreement.
        param: the request field at fault, or None.
        code: a short machine-readable name, as in OpenAI error objects.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ProtocolError(NpucompileError, ValueError):
    """Raised when a peer sent something that is not a legal message.

    Args:
        message: what came and what is legal.
        code: a short machine-readable name, as in OpenAI error objects.
    """

    def __init__(self, message: str, *, code: str = "invalid_message") -> None:
        super().__init__(message)
        self.code = code
