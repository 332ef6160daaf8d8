"""The HTTP endpoints of the controller; each hands over to `Controller` or `Loop`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Response
from pydantic import BaseModel

from controller import examples
from controller.control import Operator
from controller.core import Controller
from controller.death_watch import DeathWatch
from controller.export.api import build_export_router
from controller.loop import Loop
from controller.schema import (
    AgentLease,
    AgentRegistration,
    BudgetSpec,
    BudgetStatus,
    ControlReply,
    ControlRequest,
    DecisionPage,
    Directives,
    Fleet,
    Heartbeat,
    HeartbeatReply,
    IslandStatus,
    PolicySpec,
    RecoveryPage,
    RoundPage,
    SampleBatch,
    SampleReceipt,
)
from service.routes import counting_route

MAX_WAIT_S = 30.0
# Number of an id or a position that SQLite can hold.
MAX_NUMBER = 2**63 - 1

SAMPLES_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SampleBatch.model_json_schema(), "examples": examples.SAMPLES}},
    }
}
"""Ten thousand samples per second are parsed by `read_batch`, and FastAPI does not see them."""

AgentId = Annotated[str, Path(min_length=1, max_length=128)]
Instance = Annotated[str, Query(min_length=1, max_length=64, description="The process that asks.")]


def build_router(controller: Controller, loop: Loop, watch: DeathWatch) -> APIRouter:
    router = APIRouter(prefix="/v1")
    _add_fleet_routes(router, controller)
    _add_operator_routes(router, controller, Operator(controller, loop))
    router.include_router(build_export_router(controller))
    agents = APIRouter(route_class=counting_route(controller.metrics.reports.labels("invalid")))
    _add_agent_routes(agents, controller, watch)
    router.include_router(agents)
    return router


def _add_fleet_routes(router: APIRouter, controller: Controller) -> None:
    @router.post(
        "/samples",
        tags=["sidecars"],
        summary="Load samples, judged one by one",
        openapi_extra=SAMPLES_BODY,
        response_model=SampleReceipt,
    )
    async def post_samples(request: Request) -> Response:
        return _answer(await controller.ingest(await request.body()))

    @router.get("/fleet", tags=["views"], summary="Servers and islands as of now")
    async def get_fleet() -> Fleet:
        return controller.fleet()

    @router.get("/islands", tags=["views"], summary="All agents, with and without a slot")
    async def get_islands() -> list[IslandStatus]:
        return controller.islands()

    @router.get("/decisions", tags=["views"], summary="Journalled decisions with all their terms, oldest first")
    async def get_decisions(
        since: Annotated[
            int | None,
            Query(ge=0, le=MAX_NUMBER, description="Only decisions with a higher id; without it the newest ones."),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> DecisionPage:
        return await controller.decisions(since=since, limit=limit)

    @router.get("/recoveries", tags=["views"], summary="What was lost and how it came back, oldest first")
    async def get_recoveries(
        since: Annotated[
            int | None,
            Query(ge=0, le=MAX_NUMBER, description="Only records with a higher id; without it the newest ones."),
        ] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> RecoveryPage:
        return await controller.recoveries(since=since, limit=limit)

    @router.get("/rounds", tags=["views"], summary="The newest outer rounds, oldest first")
    async def get_rounds(limit: Annotated[int, Query(ge=1, le=1000)] = 1000) -> RoundPage:
        return controller.rounds(limit=limit)


def _add_agent_routes(router: APIRouter, controller: Controller, watch: DeathWatch) -> None:
    @router.post("/agents", tags=["agents"], summary="Register, or renew after a restart")
    async def post_agent(
        request: Annotated[AgentRegistration, Body(openapi_examples=examples.REGISTRATION)],
    ) -> AgentLease:
        return await controller.register(request)

    @router.post(
        "/agents/{agent_id:path}/heartbeat",
        tags=["agents"],
        summary="Renew the lease, report progress",
        response_model=HeartbeatReply,
    )
    async def post_heartbeat(
        agent_id: AgentId, beat: Annotated[Heartbeat, Body(openapi_examples=examples.HEARTBEAT)]
    ) -> Response:
        return _answer(await controller.heartbeat(agent_id, beat))

    @router.get(
        "/agents/{agent_id:path}/directives",
        tags=["agents"],
        summary="Long poll for directives",
        response_model=Directives,
    )
    async def get_directives(
        request: Request,
        agent_id: AgentId,
        instance: Instance,
        after: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Number of the last directive seen.")] = 0,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> Response:
        asking = controller.directives(agent_id, instance=instance, after=after, wait_s=wait_s)
        return _answer(await watch.while_connected(request.receive, agent_id, instance, asking))

    @router.delete(
        "/agents/{agent_id:path}", tags=["agents"], status_code=204, summary="Leave: the slot is free at once"
    )
    async def delete_agent(agent_id: AgentId, instance: Instance) -> None:
        await controller.leave(agent_id, instance)


def _answer(model: BaseModel) -> Response:
    """What a thousand islands get at once is not checked against the model that it was made of."""
    return Response(model.model_dump_json(), media_type="application/json")


def _add_operator_routes(router: APIRouter, controller: Controller, operator: Operator) -> None:
    @router.get("/policy", tags=["operator"], summary="The policy in force")
    async def get_policy() -> PolicySpec:
        return controller.state.policy_spec

    @router.put("/policy", tags=["operator"], summary="Change the policy")
    async def put_policy(spec: Annotated[PolicySpec, Body(openapi_examples=examples.POLICY)]) -> PolicySpec:
        return await controller.set_policy(spec)

    @router.get("/budget", tags=["operator"], summary="The running budget period")
    async def get_budget() -> BudgetStatus:
        return controller.state.budget

    @router.put("/budget", tags=["operator"], summary="Start a new budget period now")
    async def put_budget(spec: Annotated[BudgetSpec, Body(openapi_examples=examples.BUDGET)]) -> BudgetStatus:
        return await controller.set_budget(spec)

    @router.post("/control", tags=["operator"], summary="Pause, resume, sync now, drain, swap; or what that would do")
    async def post_control(
        request: Annotated[ControlRequest, Body(openapi_examples=examples.CONTROL)],
    ) -> ControlReply:
        return await operator.obey(request)
