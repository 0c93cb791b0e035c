"""The labels that nodes have on each cloud: which are spot machines, and which GPU is in them."""

from dataclasses import dataclass, field

from raygpt.errors import RaygptError


@dataclass(frozen=True)
class Cloud:
    """Node labels of one kind of cluster."""

    spot: tuple[str, str] | None = None  # label and value of a spot machine
    gpu_label: str | None = None
    gpu_names: dict[str, str] = field(default_factory=dict)  # Ray's name of a GPU -> the label's value

    def gpu_selector(self, accelerator_type: str | None) -> dict[str, str]:
        """The node selector for a GPU by Ray's name."""
        if not accelerator_type or not self.gpu_label:
            return {}
        if accelerator_type not in self.gpu_names:
            raise RaygptError(
                f"cluster.accelerator_type: no node label is known for {accelerator_type}; leave it out and write "
                f"--node-selector KEY=VALUE, or one of {', '.join(self.gpu_names)}"
            )
        return {self.gpu_label: self.gpu_names[accelerator_type]}


GKE_GPUS = {
    "T4": "nvidia-tesla-t4",
    "L4": "nvidia-l4",
    "V100": "nvidia-tesla-v100",
    "A100": "nvidia-tesla-a100",
    "A100-80G": "nvidia-a100-80gb",
    "H100": "nvidia-h100-80gb",
    "H200": "nvidia-h200-141gb",
    "B200": "nvidia-b200",
}
CLOUDS = {
    "kubernetes": Cloud(),
    "gke": Cloud(("cloud.google.com/gke-spot", "true"), "cloud.google.com/gke-accelerator", GKE_GPUS),
    "eks": Cloud(("eks.amazonaws.com/capacityType", "SPOT")),
    "aks": Cloud(("kubernetes.azure.com/scalesetpriority", "spot")),
    "slurm": Cloud(),
}
