# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""IAM: projects with limits, principals, keys, grants, roles, the audit log. ``client.iam``."""

from __future__ import annotations

import typing

from libdsec import _wire
from libdsec._sync.transport import Transport

Limits = typing.Mapping[str, int]


class Iam:
    """What the caller's key may see and change of IAM. Objects are dicts as the API gives them (docs/iam.md).

    Every call raises errors.PermissionDeniedError (``auth.forbidden``, ``iam.rights_exceed``), errors.NotFoundError (also for what
    the caller sees nothing of), errors.InvalidArgumentError with the field, errors.ConflictError.
    """

    def __init__(self, transport: Transport):
        self._transport = transport

    def _call(self, method: str, path: str, body: typing.Optional[dict] = None) -> dict:
        response = self._transport.call(method, path, body=body)
        return response.json() if response.content else {}

    def _list(self, path: str, key: str, **query: typing.Any) -> typing.Iterator[dict]:
        token = None
        while True:
            page = self._call("GET", path + _wire.query(page_size=500, page_token=token, **query))
            for item in page[key]:
                yield item
            token = page["next_page_token"]
            if not token:
                return

    def whoami(self) -> dict:
        """The principal, its key's id, its home project and its rights there and where it has grants."""
        return self._call("GET", "/v1/iam/whoami")

    # --- projects ---

    def projects(self) -> typing.Iterator[dict]:
        """Yields the projects that the caller sees."""
        return self._list("/v1/iam/projects", "projects")

    def project(self, project: str) -> dict:
        """One project with its limits and what it uses, all below it included."""
        return self._call("GET", f"/v1/iam/projects/{_wire.segment(project)}")

    def put_project(self, project: str, *, limits: typing.Optional[Limits] = None,
                          rights: typing.Optional[typing.Sequence[str]] = None, description: str = "") -> dict:
        """Makes a project, or replaces its settings.

        Args:
            project: ``root/team/job``; the one above must exist.
            limits: of ``live``, ``creating``, ``cpu_millis``, ``memory_bytes``, ``disk_bytes``, ``starts_per_second``; what is
                missing has no limit of its own. None may be above that of a project above.
            rights: ceiling: nobody has others in it and below. None: that of the project above.
        """
        body: typing.Dict[str, typing.Any] = {"limits": dict(limits or {}), "description": description}
        if rights is not None:
            body["rights"] = list(rights)
        return self._call("PUT", f"/v1/iam/projects/{_wire.segment(project)}", body)

    def delete_project(self, project: str) -> None:
        """Removes a project that has no sandboxes, no projects below it and no principals at home in it."""
        self._call("DELETE", f"/v1/iam/projects/{_wire.segment(project)}")

    # --- principals and keys ---

    def principals(self) -> typing.Iterator[dict]:
        """Yields the principals that the caller sees."""
        return self._list("/v1/iam/principals", "principals")

    def principal(self, principal: str) -> dict:
        """One principal."""
        return self._call("GET", f"/v1/iam/principals/{_wire.segment(principal)}")

    def put_principal(self, principal: str, *, project: str, kind: str = "person", description: str = "",
                            disabled: bool = False) -> dict:
        """Makes or changes a person, service or agent that is at home in ``project``."""
        body = {"kind": kind, "project": project, "description": description, "disabled": disabled}
        return self._call("PUT", f"/v1/iam/principals/{_wire.segment(principal)}", body)

    def delete_principal(self, principal: str) -> None:
        """Removes a principal; its keys open nothing from now on."""
        self._call("DELETE", f"/v1/iam/principals/{_wire.segment(principal)}")

    def keys(self, principal: str) -> typing.Iterator[dict]:
        """Yields the keys of a principal, without their secrets."""
        return self._list(f"/v1/iam/principals/{_wire.segment(principal)}/keys", "keys")

    def make_key(self, principal: str, *, project: typing.Optional[str] = None,
                       rights: typing.Optional[typing.Sequence[str]] = None, expires_unix_ms: typing.Optional[int] = None,
                       description: str = "") -> dict:
        """Makes a key: ``{"secret": "dsec_...", "key": {"key_id": ...}}``. The secret is in this reply and nowhere else.

        Args:
            project, rights: narrow the key to a part of the tree and to some of its principal's rights.
            expires_unix_ms: when it ends; None: never, or with the key that makes it.
        """
        body: typing.Dict[str, typing.Any] = {"description": description}
        if project is not None:
            body["project"] = project
        if rights is not None:
            body["rights"] = list(rights)
        if expires_unix_ms is not None:
            body["expires_unix_ms"] = expires_unix_ms
        return self._call("POST", f"/v1/iam/principals/{_wire.segment(principal)}/keys", body)

    def revoke_key(self, key_id: str) -> None:
        """Revokes a key: refused on every apiserver within a second. Safe to repeat."""
        self._call("DELETE", f"/v1/iam/keys/{_wire.segment(key_id)}")

    # --- grants and roles ---

    def grants(self, project: str) -> typing.Iterator[dict]:
        """Yields the grants of a project; ``effective_rights`` is what each comes to now."""
        return self._list(f"/v1/iam/projects/{_wire.segment(project)}/grants", "grants")

    def grant(self, principal: str, project: str, *, role: typing.Optional[str] = None,
                    rights: typing.Optional[typing.Sequence[str]] = None) -> dict:
        """Gives a principal a role, or rights, in a project and below it: no more than the caller has there."""
        body: typing.Dict[str, typing.Any] = {}
        if role is not None:
            body["role"] = role
        if rights is not None:
            body["rights"] = list(rights)
        return self._call("PUT", f"/v1/iam/projects/{_wire.segment(project)}/grants/{_wire.segment(principal)}", body)

    def ungrant(self, principal: str, project: str) -> None:
        """Takes a grant away."""
        self._call("DELETE", f"/v1/iam/projects/{_wire.segment(project)}/grants/{_wire.segment(principal)}")

    def roles(self) -> typing.Iterator[dict]:
        """Yields the roles, built in and own."""
        return self._list("/v1/iam/roles", "roles")

    def put_role(self, role: str, rights: typing.Sequence[str], *, description: str = "") -> dict:
        """Makes or changes a role."""
        return self._call("PUT", f"/v1/iam/roles/{_wire.segment(role)}", {"rights": list(rights), "description": description})

    def delete_role(self, role: str) -> None:
        """Removes a role that nobody has."""
        self._call("DELETE", f"/v1/iam/roles/{_wire.segment(role)}")

    def audit(self, *, principal: typing.Optional[str] = None, key_id: typing.Optional[str] = None,
              project: typing.Optional[str] = None) -> typing.Iterator[dict]:
        """Yields the audit log, newest first: of one principal, of one key, of a project and what is below."""
        return self._list("/v1/iam/audit", "records", principal=principal, key_id=key_id, project=project)
