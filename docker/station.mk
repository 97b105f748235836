# The station's targets; the Makefile includes this file.

.PHONY: up down shell ssh ssh-command logs url status rebuild clean-station engine base sbom audit test-image
up: ## start the station: JupyterLab on 8888, ssh on 2222 (GPUS=none, all, 2 or 0,1)
	@scripts/station.sh up

down: ## stop it, saving runs; runs, home folder and host keys stay
	@scripts/station.sh down

# ARGS of these four is meant for inside: it goes to the script as it was typed, through neither make nor a shell here.
unexport ARGS
shell ssh logs rebuild: export STATION_ARGS := $(value ARGS)

shell: ## a shell inside (ARGS=--noprofile: without the files in the home folder)
	@scripts/station.sh shell

ssh: ## log in over ssh (ARGS="a; b": run that inside)
	@scripts/station.sh ssh

ssh-command: ## the ssh command as one line, to paste or to script
	@scripts/station.sh ssh-command

logs: ## what the services print (ARGS=-f follows)
	@scripts/station.sh logs

url: ## JupyterLab's address with its token
	@scripts/station.sh url

status: ## is it healthy, and which runs are there
	@scripts/station.sh status

rebuild: ## build the image again and start it
	@scripts/station.sh rebuild

clean-station: ## remove container, volumes and images; runs and data stay
	@scripts/station.sh clean

engine: ## install and start a Docker engine (Debian, Ubuntu; as root)
	@scripts/engine.sh

base: ## build the base image from Debian's archive, where no image registry answers
	@scripts/base.sh

sbom: ## list what the image is made of, as CycloneDX: build/sbom.json
	@scripts/sbom.sh list

audit: ## ask Debian which packages of the image it has mended since
	@scripts/sbom.sh audit

test-image: setup ## build the image and test the running station, on a real engine
	@scripts/test-image.sh $(ARGS)
