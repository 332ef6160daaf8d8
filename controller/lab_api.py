"""The HTTP endpoints of the lab: headroom, policies in shadow, experiments."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fastapi import APIRouter, Body, Path, Query
from fastapi.openapi.models import Example

from controller.core import Controller
from controller.headroom_monitor import WINDOW_S
from controller.lab_schema import ExperimentPage, ExperimentSpec, ExperimentStatus, Headroom, ShadowOrder, ShadowPage
from service.errors import InputError

MIN_WINDOW_S, MAX_WINDOW_S = 360, WINDOW_S

ExperimentId = Annotated[int, Path(ge=1, le=2**31)]
SHADOWS: dict[str, Example] = {
    "two beside the one in force": {
        "value": {"policies": [{"name": "fixed_h", "params": {"h": 256}}, {"name": "random_deferral"}]}
    }
}
EXPERIMENT: dict[str, Example] = {
    "does the workload-aware policy pay?": {
        "value": {
            "a": {"name": "wa_diloco"},
            "b": {"name": "random_deferral"},
            "blocks": 16,
            "block_s": 1800,
            "washout_s": 60,
            "syncs_per_block": 3,
            "min_gap_s": 60,
            "seed": 1,
        }
    }
}


class NoExperimentError(InputError):
    """No experiment has this number."""

    http_status: ClassVar[int] = 404


def build_lab_router(controller: Controller) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["lab"])
    _add_shadow_routes(router, controller)
    _add_experiment_routes(router, controller)
    return router


def _add_shadow_routes(router: APIRouter, controller: Controller) -> None:
    @router.get("/headroom", summary="What timing syncs could save here, and how much of it each policy takes")
    async def get_headroom(
        window_s: Annotated[
            int, Query(ge=MIN_WINDOW_S, le=MAX_WINDOW_S, description="The default is computed every 30 s.")
        ] = WINDOW_S,
    ) -> Headroom:
        return await controller.lab.report_headroom(window_s)

    @router.get("/shadow", summary="Policies that run beside the one in force")
    async def get_shadow() -> ShadowPage:
        return ShadowPage(policies=controller.lab.shadows.statuses())

    @router.put("/shadow", summary="Run these beside it from now on, and no others")
    async def put_shadow(order: Annotated[ShadowOrder, Body(openapi_examples=SHADOWS)]) -> ShadowPage:
        return await controller.lab.set_shadows(order)


def _add_experiment_routes(router: APIRouter, controller: Controller) -> None:
    @router.post("/experiments", status_code=201, summary="Start a switchback experiment")
    async def post_experiment(spec: Annotated[ExperimentSpec, Body(openapi_examples=EXPERIMENT)]) -> ExperimentStatus:
        return await controller.lab.start_experiment(spec)

    @router.get("/experiments", summary="All experiments of this run, oldest first")
    async def get_experiments() -> ExperimentPage:
        return ExperimentPage(experiments=await controller.lab.all_experiments())

    @router.get("/experiments/{number}", summary="How far it is, and its result so far")
    async def get_experiment(number: ExperimentId) -> ExperimentStatus:
        return _found(await controller.lab.experiment(number), number)

    @router.delete("/experiments/{number}", summary="Stop it: policy and budget from before return")
    async def delete_experiment(number: ExperimentId) -> ExperimentStatus:
        return _found(await controller.lab.stop_experiment(number), number)


def _found(status: ExperimentStatus | None, number: int) -> ExperimentStatus:
    if status is None:
        raise NoExperimentError(f"there is no experiment {number}", field="number", remedy="see GET /v1/experiments")
    return status
