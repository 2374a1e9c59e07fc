"""What Hearth's own code makes of the output of a host's tools, as filters."""

from __future__ import annotations

from typing import Any

from hearth.deploy import apt, facts, rooms


class FilterModule:
    """Ansible finds filters here."""

    def filters(self) -> dict[str, Any]:
        """Each filter under its name."""
        return {
            "hearth_pci_gpus": facts.pci_gpus,
            "hearth_gpu_count_problem": facts.gpu_count_problem,
            "hearth_problems": facts.problems,
            "hearth_asked": facts.asked,
            "hearth_json": facts.last_json,
            "hearth_release_differs": facts.release_differs,
            "hearth_scraped": facts.scraped,
            "hearth_packages_missing": apt.missing,
            "hearth_packages_loose": apt.loose,
            "hearth_not_offered": apt.not_offered,
            "hearth_is_driver": apt.is_driver,
            "hearth_kernels": apt.kernels,
            "hearth_kernel_packages": apt.kernel_packages,
            "hearth_reboot_problem": apt.reboot_problem,
            "hearth_rooms": rooms.rooms,
            "hearth_room_problems": rooms.room_problems,
        }
