# The station's targets; the Makefile includes this file.

.PHONY: up down shell ssh ssh-command logs url rotate status rebuild clean-station engine base sbom audit test-image
up: ## start the station: JupyterLab on 8888, ssh on 2222 (GPUS=none, all, 2 or 0,1)
down: ## stop it, saving runs; runs, home folder and host keys stay
shell: ## a shell inside (ARGS=--noprofile: without the files in the home folder)
ssh: ## log in over ssh (ARGS="a; b": run that inside)
ssh-command: ## the ssh command as one line, to paste or to script
logs: ## what the services print (ARGS=-f follows)
url: ## JupyterLab's address with its token
rotate: ## somebody leaves: new token and keys, and what he left in the home folder is set aside; runs go on
status: ## is it healthy, and which runs are there
rebuild: ## build the image again and start it
clean-station: ## remove container, volumes and images; runs and data stay

# ARGS of these four is meant for inside: it goes to the script as it was typed, through neither make nor a shell here.
unexport ARGS
shell ssh logs rebuild: export STATION_ARGS := $(value ARGS)
up down shell ssh ssh-command logs url rotate status rebuild clean-station:
	@scripts/station.sh $@

engine: ## install and start a Docker engine (Debian, Ubuntu; as root)
base: ## build the base image from Debian's archive, where no image registry answers
engine base:
	@scripts/$@.sh

sbom: ## list what the image is made of, as CycloneDX: build/sbom.json
audit: ## ask Debian which packages of the image it has mended since
sbom audit:
	@scripts/sbom.sh $@

test-image: setup ## build the image and test the running station, on a real engine; some: IN=tests/image/test_ssh.py
	@scripts/test-image.sh $(or $(IN),tests/image) $(ARGS)
